#include "bench_case.h"

#include <algorithm>
#include <numeric>

#include "base/check.h"
#include "base/math.h"

namespace uniep::tool {
namespace {

std::vector<std::int64_t> count_rows(const std::vector<std::int32_t>& topk_ids, int num_experts) {
  std::vector<std::int64_t> rows(static_cast<std::size_t>(num_experts));
  for (const std::int32_t id : topk_ids) ++rows[static_cast<std::size_t>(id)];
  return rows;
}

}  // namespace

std::int64_t BenchCase::rows() const {
  return std::accumulate(rows_per_expert.begin(), rows_per_expert.end(), std::int64_t{0});
}

std::int64_t BenchCase::rows(int rank) const {
  const auto first = rows_per_expert.begin() + rank * local_experts();
  return std::accumulate(first, first + local_experts(), std::int64_t{0});
}

std::vector<WireRows> wire_rows(const BenchCase& bench) {
  std::vector<WireRows> wire(static_cast<std::size_t>(bench.ranks));
  const auto slots = static_cast<std::size_t>(bench.spec.topk);
  for (std::size_t first = 0; first < bench.routing.topk_ids.size(); first += slots) {
    const auto token = static_cast<std::int64_t>(first / slots);
    const auto source = static_cast<std::size_t>(token / bench.spec.tokens);
    std::vector<bool> pulls(wire.size());
    for (std::size_t slot = first; slot < first + slots; ++slot) {
      const auto rank =
          static_cast<std::size_t>(bench.routing.topk_ids[slot] / bench.local_experts());
      if (rank == source) continue;
      pulls[rank] = true;
      ++wire[rank].pushed;
      ++wire[source].returned;
    }
    for (std::size_t rank = 0; rank < wire.size(); ++rank) {
      if (!pulls[rank]) continue;
      ++wire[rank].pulled;
      ++wire[source].served;
    }
  }
  return wire;
}

workload::ShapeSpec parse_bench_shape(const std::string& shape, int ranks) {
  workload::ShapeSpec spec = workload::parse_shape(shape);
  require(spec.num_experts % ranks == 0, ErrorCode::kInvalidArgument, "--shape ", shape, " has ",
          spec.num_experts, " experts, which cannot be split over ", ranks,
          " ranks; a number of ranks that divides the experts is accepted");
  return spec;
}

BenchCase make_case(const std::string& shape, int ranks, std::uint64_t seed, double skew) {
  BenchCase c{.name = shape, .spec = parse_bench_shape(shape, ranks), .ranks = ranks, .seed = seed};
  c.skew = skew;
  c.routing = workload::make_routing(c.spec, ranks, seed, skew);
  c.rows_per_expert = count_rows(c.routing.topk_ids, c.spec.num_experts);
  c.problem = {.hidden = c.spec.hidden,
               .intermediate = c.spec.intermediate,
               .num_experts = c.spec.num_experts,
               .topk = c.spec.topk,
               .max_tokens = c.spec.tokens};
  c.problem.capacity_rows = bench_capacity(c.problem, ranks, c.rows_per_expert);
  validate(c.problem, ranks);
  return c;
}

std::int64_t bench_capacity(const Problem& problem, int ranks,
                            const std::vector<std::int64_t>& rows_per_expert) {
  const std::int64_t experts = problem.num_experts / ranks;
  const std::int64_t twice_balanced =
      2 * problem.max_tokens * problem.topk + experts * problem.row_align;
  std::int64_t fullest = 0;
  for (auto first = rows_per_expert.begin(); first != rows_per_expert.end(); first += experts) {
    std::int64_t rows = 0;
    for (auto e = first; e != first + experts; ++e) {
      rows += round_up<std::int64_t>(*e, problem.row_align);
    }
    fullest = std::max(fullest, rows);
  }
  Problem any = problem;
  any.capacity_rows = 0;
  return std::max(fullest, std::min(twice_balanced, capacity_rows(any, ranks)));
}

}  // namespace uniep::tool
