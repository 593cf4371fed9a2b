#include "bench/bench_size.h"

#include <vector>

#include "bench/bench_case.h"
#include "common/layer_memory.h"
#include "common/work_limits.h"

namespace uniep::tool {
namespace {

/// Inputs, results, and what the library holds for a step of every rank.
double bytes_of(const workload::ShapeSpec& spec, const RankLayout& layout, int results) {
  const int ranks = layout.ranks();
  Problem problem = workload::problem_of(spec);
  const std::vector<std::int64_t> no_rows(static_cast<std::size_t>(spec.num_experts), 0);
  problem.capacity_rows = bench_capacity(problem, ranks, no_rows);
  return (1.0 + results) * static_cast<double>(workload::layer_bytes(spec, ranks)) +
         static_cast<double>(ranks) *
             static_cast<double>(layer_memory(problem, ranks, layout.hosts));
}

}  // namespace

void require_measurable(const std::string& what, const workload::ShapeSpec& spec,
                        const RankLayout& layout, int results) {
  require_memory(what, layout.ranks(), bytes_of(spec, layout, results));
  require_short_passes(what, spec, layout.ranks());
}

}  // namespace uniep::tool
