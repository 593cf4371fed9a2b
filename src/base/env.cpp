#include "base/env.h"

#include <charconv>
#include <cmath>
#include <cstdlib>

#include "base/check.h"

namespace uniep {
namespace {

constexpr EnvVariable kVariables[] = {
    {"UNIEP_TIMEOUT_MS", "limit of every wait, in milliseconds (1 to 3600000)", "30000"},
    {"UNIEP_CPU_LINK_GBPS",
     "emulate a link between CPU ranks: speed per direction in 1e9 bytes/s (above 0)", "off"},
    {"UNIEP_CPU_LINK_LATENCY_US", "latency of the emulated link, in microseconds (0 to 1000000)",
     "5"},
    {"UNIEP_CPU_ISA", "instruction set of the CPU kernels: portable, avx2 or avx512",
     "best available"},
};

const char* value_of(const char* name) {
  const char* text = std::getenv(name);
  return text != nullptr && *text != '\0' ? text : nullptr;
}

double number(const char* name, const char* text, double low, int high) {
  char* end = nullptr;
  const double v = std::strtod(text, &end);
  require(*end == '\0' && std::isfinite(v) && v >= low && v <= high, ErrorCode::kInvalidArgument,
          "environment variable ", name, " is '", text, "'; a number from ", low, " to ", high,
          " is accepted");
  return v;
}

}  // namespace

std::span<const EnvVariable> environment_variables() { return kVariables; }

int env_timeout_ms() {
  const char* text = value_of("UNIEP_TIMEOUT_MS");
  return text == nullptr ? 30000 : static_cast<int>(number("UNIEP_TIMEOUT_MS", text, 1, 3600000));
}

std::optional<double> env_link_gbps() {
  const char* text = value_of("UNIEP_CPU_LINK_GBPS");
  if (text == nullptr) return std::nullopt;
  return number("UNIEP_CPU_LINK_GBPS", text, 1e-6, 1000000);
}

double env_link_latency_us() {
  const char* text = value_of("UNIEP_CPU_LINK_LATENCY_US");
  return text == nullptr ? 5.0 : number("UNIEP_CPU_LINK_LATENCY_US", text, 0, 1000000);
}

std::string env_cpu_isa() {
  const char* text = value_of("UNIEP_CPU_ISA");
  return text == nullptr ? "" : text;
}

}  // namespace uniep
