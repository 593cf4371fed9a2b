#include "bench/bench_size.h"

#include <algorithm>
#include <vector>

#include "base/check.h"
#include "base/cpu_info.h"
#include "base/memory_info.h"
#include "bench/bench_case.h"
#include "bench/bench_figures.h"
#include "common/layer_memory.h"
#include "common/table.h"
#include "cpu/kernels/kernels.h"

namespace uniep::tool {
namespace {

// On one core of an AMD EPYC VM (2026-11-24) a logit took 13 ns: these are 14 s.
constexpr double kMostLogits = 1 << 30;

constexpr double kMostMinutes = 10;  // of a pass

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

double minutes_of_a_pass(const workload::ShapeSpec& spec, int ranks) {
  double flops = 0;  // of a backward pass, the longer one
  for (const Product& p : products(spec, Pass::kBackward, ranks * spec.tokens * spec.topk)) {
    flops += p.flops();
  }
  return flops / (flops_of_a_core() * usable_cpus()) / 60;
}

/// Inputs, results, and what the library holds for a step of every rank.
double bytes_of(const workload::ShapeSpec& spec, int ranks, int results) {
  Problem problem = workload::problem_of(spec);
  const std::vector<std::int64_t> no_rows(static_cast<std::size_t>(spec.num_experts), 0);
  problem.capacity_rows = bench_capacity(problem, ranks, no_rows);
  return (1.0 + results) * static_cast<double>(workload::layer_bytes(spec, ranks)) +
         static_cast<double>(ranks) * static_cast<double>(layer_memory(problem, ranks));
}

}  // namespace

void require_routable(const workload::ShapeSpec& spec, int ranks) {
  const double logits = static_cast<double>(ranks) * static_cast<double>(spec.tokens) *
                        static_cast<double>(spec.num_experts);
  require(logits <= kMostLogits, ErrorCode::kCapacity, "--shape ", workload::to_string(spec),
          " at ", counted(ranks, "rank", "ranks"), " needs ", formatted("%.3g", logits),
          " router logits (ranks x tokens x experts), which would take too long; at most ",
          formatted("%.3g", kMostLogits), " are made up, so fewer tokens or experts are accepted");
}

void require_measurable(const std::string& what, const workload::ShapeSpec& spec, int ranks,
                        int results) {
  const double needed = bytes_of(spec, ranks, results);
  const double available = available_memory();
  require(available == 0 || needed <= available, ErrorCode::kCapacity, what, " at ",
          counted(ranks, "rank", "ranks"), " needs some ", bytes_text(needed), " of memory, and ",
          bytes_text(available), " are free; fewer tokens, experts or ranks are accepted");
  const double minutes = minutes_of_a_pass(spec, ranks);
  require(minutes <= kMostMinutes, ErrorCode::kCapacity, what, " at ",
          counted(ranks, "rank", "ranks"), " would take some ", formatted("%.0f", minutes),
          " minutes for each pass on ", counted(usable_cpus(), "CPU", "CPUs"), "; at most ",
          kMostMinutes, " are accepted, so fewer tokens or experts, or a smaller layer");
}

}  // namespace uniep::tool
