#include "common/work_limits.h"

#include <algorithm>

#include "base/check.h"
#include "base/cpu_info.h"
#include "base/memory_info.h"
#include "common/table.h"
#include "cpu/kernels/kernels.h"

namespace uniep::tool {
namespace {

// On one core of an AMD EPYC VM (2026-11-24) a logit took 13 ns: these are 14 s.
constexpr double kMostLogits = 1 << 30;

constexpr double kMostMinutesOfAPass = 10;
constexpr double kMostMinutesOfACheck = 60;  // it shows how far it is

// Besides its arithmetic, on one core of an Intel Xeon VM (2026-11-24): rows of 8 columns took
// 0.5 us each.
constexpr double kSecondsOfARow = 0.2e-6;

// The float64 layer with its bounds runs on one core. On an Intel Xeon VM (2026-11-24) 19 GFLOP of
// `small,tokens=8192` took 14 s, and 5e7 elements of weights that hardly a token uses took 6 s.
constexpr double kFlopsOfTheCheck = 1.4e9;
constexpr double kCheckSecondsOfAnElement = 0.13e-6;

/// Two thirds of what a core's GEMM of a tile reaches (docs/performance.md).
double flops_of_a_core() {
  switch (cpu::kernels().isa) {
    case cpu::Isa::kAvx512:
      return 100e9;
    case cpu::Isa::kAvx2:
      return 50e9;
    case cpu::Isa::kPortable:
      break;
  }
  return 15e9;
}

double rows_of(const workload::ShapeSpec& spec, int ranks) {
  const int slots = spec.topk + spec.shared_experts;
  return static_cast<double>(ranks) * static_cast<double>(spec.tokens) * slots;
}

/// Three products of H x I numbers a row in forward; backward has each of them twice.
double flops_of(const workload::ShapeSpec& spec, int ranks, Pass pass) {
  const double products = pass == Pass::kForward ? 3 : 6;
  return 2 * products * rows_of(spec, ranks) * static_cast<double>(spec.hidden) *
         static_cast<double>(spec.intermediate);
}

double elements_of(const workload::ShapeSpec& spec, int ranks) {
  return static_cast<double>(workload::layer_bytes(spec, ranks)) / 2;  // nearly all are bf16
}

double seconds_of_check(const workload::ShapeSpec& spec, int ranks, bool backward) {
  double flops = flops_of(spec, ranks, Pass::kForward);
  if (backward) flops += flops_of(spec, ranks, Pass::kBackward);
  return flops / kFlopsOfTheCheck + kCheckSecondsOfAnElement * elements_of(spec, ranks);
}

/// Numbers with bounds for the inputs and for the results, the result to compare with, and three
/// numbers for each element of the tensor at hand.
double bytes_of_check(const workload::ShapeSpec& spec, int ranks) {
  const double w1 = 2.0 * static_cast<double>(spec.num_experts * spec.hidden) *
                    static_cast<double>(spec.intermediate);
  const double x = static_cast<double>(ranks * spec.tokens) * static_cast<double>(spec.hidden);
  constexpr double kBytesOfABound = 16;
  return elements_of(spec, ranks) * (2 * kBytesOfABound + 2) + 3 * sizeof(double) * std::max(w1, x);
}

void require_minutes(double minutes, double most, const std::string& what, int ranks,
                     const std::string& why, const std::string& accepted) {
  require(minutes <= most, ErrorCode::kCapacity, what, " at ", counted(ranks, "rank", "ranks"),
          " would take some ", formatted("%.0f", minutes), " minutes for ", why, "; at most ", most,
          " are accepted, so ", accepted);
}

void require_bytes(double bytes, const std::string& what, int ranks, const std::string& purpose,
                   const std::string& accepted) {
  const double available = available_memory();
  require(available == 0 || bytes <= available, ErrorCode::kCapacity, what, " at ",
          counted(ranks, "rank", "ranks"), " needs some ", bytes_text(bytes), " of memory", purpose,
          ", and ", bytes_text(available), " are free; ", accepted, " are accepted");
}

}  // namespace

void require_memory(const std::string& what, int ranks, double bytes) {
  require_bytes(bytes, what, ranks, "", "fewer tokens, experts or ranks");
}

void require_routable(const workload::ShapeSpec& spec, int ranks) {
  const double logits = static_cast<double>(ranks) * static_cast<double>(spec.tokens) *
                        static_cast<double>(spec.num_experts);
  require(logits <= kMostLogits, ErrorCode::kCapacity, "--shape ", workload::to_string(spec),
          " at ", counted(ranks, "rank", "ranks"), " needs ", formatted("%.3g", logits),
          " router logits (ranks x tokens x experts), which would take too long; at most ",
          formatted("%.3g", kMostLogits), " are made up, so fewer tokens or experts are accepted");
}

double usual_pass_seconds(const workload::ShapeSpec& spec, int ranks, Pass pass) {
  const double of_a_core =
      flops_of(spec, ranks, pass) / flops_of_a_core() + kSecondsOfARow * rows_of(spec, ranks);
  return of_a_core / usable_cpus();
}

void require_short_passes(const std::string& what, const workload::ShapeSpec& spec, int ranks) {
  require_minutes(usual_pass_seconds(spec, ranks, Pass::kBackward) / 60, kMostMinutesOfAPass, what,
                  ranks, cat("each pass on ", counted(usable_cpus(), "CPU", "CPUs")),
                  "fewer tokens or experts, or a smaller layer");
}

void require_checkable(const std::string& what, const workload::ShapeSpec& spec, int ranks,
                       bool backward) {
  require_minutes(seconds_of_check(spec, ranks, backward) / 60, kMostMinutesOfACheck, what, ranks,
                  "--check, which computes it in float64",
                  "fewer tokens, a smaller layer, or no --check");
  require_bytes(bytes_of_check(spec, ranks), what, ranks, " for --check",
                "fewer tokens or experts, or no --check,");
}

}  // namespace uniep::tool
