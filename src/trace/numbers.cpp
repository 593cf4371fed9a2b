#include "trace/numbers.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "base/check.h"

namespace uniep::trace {
namespace {

/// Less is nothing, in any unit.
constexpr double kLeast = 1e-200;

std::string fixed(double value, int decimals) {
  char text[400];
  std::snprintf(text, sizeof text, "%.*f", decimals, value);
  return text;
}

}  // namespace

double tick_step(double max, int most) {
  if (!(max > kLeast) || !std::isfinite(max)) return 1;
  const double rough = max / most;
  const double power = std::pow(10.0, std::floor(std::log10(rough)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (factor * power >= rough * (1 - 1e-9)) return factor * power;
  }
  return 10 * power;
}

Axis axis_up_to(double max, double least_step) {
  if (!(max > kLeast) || !std::isfinite(max)) return {};
  const double step = std::max(least_step, tick_step(max, 6));
  return {std::ceil(max / step - 1e-9) * step, step};
}

std::string tick_label(double value, double step) {
  if (value == 0) return "0";
  for (const auto& [size, suffix] : {std::pair{1e12, "T"}, {1e9, "G"}, {1e6, "M"}, {1e3, "k"}}) {
    if (step >= 10 * size) return fixed(value / size, 0) + suffix;
  }
  const int decimals = static_cast<int>(std::ceil(-std::log10(step) - 1e-9));
  return fixed(value, std::clamp(decimals, 0, 12));
}

std::string short_number(double value) {
  if (std::abs(value) >= 999.5) return fixed(value, 0);
  char text[32];
  std::snprintf(text, sizeof text, "%.3g", value);
  return text;
}

TimeUnit time_unit(double seconds) {
  if (seconds < 1e-6) return {"ns", 1e9};
  if (seconds < 1e-3) return {"\u00b5s", 1e6};
  if (seconds < 10) return {"ms", 1e3};
  return {"s", 1};
}

std::string short_time(double seconds) {
  const TimeUnit unit = time_unit(seconds);
  return cat(short_number(seconds * unit.per_second), ' ', unit.name);
}

}  // namespace uniep::trace
