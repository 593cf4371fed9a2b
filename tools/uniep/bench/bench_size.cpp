#include "bench/bench_size.h"

#include <vector>

#include "base/check.h"
#include "base/memory_info.h"
#include "bench/bench_case.h"
#include "common/layer_memory.h"
#include "common/table.h"
#include "common/work_limits.h"

namespace uniep::tool {
namespace {

/// Inputs, results, and what the library holds for a step of every rank.
double bytes_of(const workload::ShapeSpec& spec, int ranks, int results) {
  Problem problem = workload::problem_of(spec);
  const std::vector<std::int64_t> no_rows(static_cast<std::size_t>(spec.num_experts), 0);
  problem.capacity_rows = bench_capacity(problem, ranks, no_rows);
  return (1.0 + results) * static_cast<double>(workload::layer_bytes(spec, ranks)) +
         static_cast<double>(ranks) * static_cast<double>(layer_memory(problem, ranks));
}

}  // namespace

void require_measurable(const std::string& what, const workload::ShapeSpec& spec, int ranks,
                        int results) {
  const double needed = bytes_of(spec, ranks, results);
  const double available = available_memory();
  require(available == 0 || needed <= available, ErrorCode::kCapacity, what, " at ",
          counted(ranks, "rank", "ranks"), " needs some ", bytes_text(needed), " of memory, and ",
          bytes_text(available), " are free; fewer tokens, experts or ranks are accepted");
  require_short_passes(what, spec, ranks);
}

}  // namespace uniep::tool
