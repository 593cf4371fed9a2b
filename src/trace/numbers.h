#pragma once

#include <string>
#include <string_view>

namespace uniep::trace {

/// A round step (1, 2 or 5 times a power of ten) that divides [0, max] into at most `most` parts.
double tick_step(double max, int most);

/// An axis from 0 on: where it ends, and how far apart its ticks are, of which there are about six.
struct Axis {
  double end = 1;
  double step = 1;
};
/// One that shows values up to `max`, with ticks `least_step` apart at least (1: of counts).
Axis axis_up_to(double max, double least_step = 0);

/// A tick of an axis whose ticks are `step` apart: with the decimals that tell it from the next,
/// large ones in thousands (k), millions (M) and so on.
std::string tick_label(double value, double step);

/// Three significant digits, or all that stand before the point.
std::string short_number(double value);

/// The unit in which a time axis up to `seconds` reads best.
struct TimeUnit {
  std::string_view name;
  double per_second;
};
TimeUnit time_unit(double seconds);

/// "12.3 ms"
std::string short_time(double seconds);

}  // namespace uniep::trace
