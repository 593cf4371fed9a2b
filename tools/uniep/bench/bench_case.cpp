#include "bench/bench_case.h"

#include <algorithm>
#include <filesystem>
#include <numeric>
#include <span>

#include "base/check.h"
#include "base/files.h"
#include "base/math.h"
#include "common/table.h"
#include "common/work_limits.h"
#include "workload/skew.h"
#include "workload/split.h"

namespace uniep::tool {
namespace {

std::vector<std::int64_t> count_rows(const std::vector<std::int32_t>& topk_ids, int num_experts) {
  std::vector<std::int64_t> rows(static_cast<std::size_t>(num_experts));
  for (const std::int32_t id : topk_ids) {
    if (id >= 0) ++rows[static_cast<std::size_t>(id)];  // else a dropped slot
  }
  return rows;
}

/// Each expert's rows begin at a multiple of `align`.
std::int64_t padded(std::span<const std::int64_t> rows_per_expert, int align) {
  std::int64_t rows = 0;
  for (const std::int64_t n : rows_per_expert) rows += round_up<std::int64_t>(n, align);
  return rows;
}

/// What follows from the spec, the split and the routing.
void complete(BenchCase& c) {
  c.rows_per_expert = count_rows(c.routing.topk_ids, c.spec.num_experts);
  c.problem = workload::problem_of(c.spec);
  c.problem.capacity_rows = bench_capacity(c.problem, c.ranks, c.rows_per_expert);
  validate(c.problem, c.ranks);
}

}  // namespace

std::vector<std::int64_t> BenchCase::tokens_per_rank() const {
  std::vector<std::int64_t> counts;
  for (int rank = 0; rank < ranks; ++rank) counts.push_back(tokens(rank));
  return counts;
}

int BenchCase::rank_of(std::int64_t token) const {
  const auto next = std::ranges::upper_bound(token_begin, token);
  return static_cast<int>(next - token_begin.begin()) - 1;
}

std::int64_t BenchCase::rows() const {
  return std::accumulate(rows_per_expert.begin(), rows_per_expert.end(), std::int64_t{0});
}

std::int64_t BenchCase::rows(int rank) const {
  const auto first = rows_per_expert.begin() + rank * local_experts();
  return std::accumulate(first, first + local_experts(), std::int64_t{0});
}

std::int64_t BenchCase::padded_rows(int rank) const {
  const auto experts = static_cast<std::size_t>(local_experts());
  const std::span<const std::int64_t> all = rows_per_expert;
  return padded(all.subspan(static_cast<std::size_t>(rank) * experts, experts), problem.row_align);
}

std::int64_t BenchCase::received_tokens(int rank) const {
  const auto slots = static_cast<std::size_t>(spec.topk);
  const std::span<const std::int32_t> ids = routing.topk_ids;
  std::int64_t tokens = 0;
  for (std::size_t first = 0; first < ids.size(); first += slots) {
    tokens += std::ranges::any_of(ids.subspan(first, slots), [&](std::int32_t id) {
      return id >= 0 && id / local_experts() == rank;
    });
  }
  return tokens;
}

std::vector<WireRows> wire_rows(const BenchCase& bench) {
  std::vector<WireRows> wire(static_cast<std::size_t>(bench.ranks));
  const auto slots = static_cast<std::size_t>(bench.spec.topk);
  for (std::size_t first = 0; first < bench.routing.topk_ids.size(); first += slots) {
    const auto token = static_cast<std::int64_t>(first / slots);
    const auto source = static_cast<std::size_t>(bench.rank_of(token));
    std::vector<bool> pulls(wire.size());
    for (std::size_t slot = first; slot < first + slots; ++slot) {
      if (bench.routing.topk_ids[slot] < 0) continue;
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

workload::ShapeSpec parse_bench_shape(const std::string& shape, int ranks,
                                      const ArithmeticFlags& arithmetic) {
  workload::ShapeSpec spec = workload::parse_shape(shape);
  arithmetic.apply_to(spec);
  require(spec.num_experts % ranks == 0, ErrorCode::kInvalidArgument, "--shape ", shape, " has ",
          counted(spec.num_experts, "expert", "experts"), ", which cannot be split over ", ranks,
          " ranks; a number of ranks that divides the experts is accepted");
  return spec;
}

BenchCase make_case(const std::string& shape, int ranks, std::uint64_t seed, double skew,
                    const ArithmeticFlags& arithmetic) {
  BenchCase c{.name = shape,
              .spec = parse_bench_shape(shape, ranks, arithmetic),
              .ranks = ranks,
              .seed = seed};
  c.skew = skew;
  require_routable(c.spec, ranks);
  c.token_begin = workload::even_parts(ranks * c.spec.tokens, ranks);
  c.routing = workload::make_routing(c.spec, ranks, seed, skew);
  complete(c);
  return c;
}

const std::vector<bf16>& tensor_of(const LayerData& layer, workload::Tensor tensor) {
  switch (tensor) {
    case workload::Tensor::kX:
      return layer.x;
    case workload::Tensor::kDy:
      return layer.dy;
    case workload::Tensor::kW1:
      return layer.w1;
    case workload::Tensor::kB1:
      return layer.b1;
    case workload::Tensor::kB2:
      return layer.b2;
    case workload::Tensor::kW2:
      break;
  }
  return layer.w2;
}

void require_dy(const BenchCase& bench, PassChoice passes) {
  require(bench.has_dy() || passes == PassChoice::kForward, ErrorCode::kInvalidArgument,
          display_name(bench.file),
          " has no tensor dy, which a backward pass needs; --pass forward is accepted");
}

BenchCase read_case(const std::string& path, int ranks, const ArithmeticFlags& arithmetic) {
  const auto layer = std::make_shared<const LayerData>(read_layer(path, arithmetic));
  const workload::Split split(*layer, ranks);  // refuses experts that do not divide
  BenchCase c{.name = std::filesystem::path(path).stem().string(), .spec = {}, .ranks = ranks};
  c.file = path;
  c.layer = layer;
  c.token_begin = workload::even_parts(layer->tokens, ranks);
  c.routing = {layer->topk_ids, layer->topk_probs};
  c.spec = {.name = "custom",
            .tokens = std::ranges::max(c.tokens_per_rank()),
            .hidden = layer->hidden,
            .intermediate = layer->intermediate,
            .num_experts = layer->num_experts,
            .topk = layer->topk,
            .activation = layer->activation,
            .probs = layer->probs,
            .bias = layer->has_bias(),
            .combine_groups = layer->combine_groups,
            .combine_partials = layer->combine_partials};
  complete(c);
  c.skew = workload::skew_of(*layer);
  return c;
}

std::int64_t bench_capacity(const Problem& problem, int ranks,
                            const std::vector<std::int64_t>& rows_per_expert) {
  const std::int64_t experts = problem.num_experts / ranks;
  const std::int64_t twice_balanced =
      2 * problem.max_tokens * problem.topk + experts * problem.row_align;
  const std::span<const std::int64_t> all = rows_per_expert;
  std::int64_t fullest = 0;
  for (std::size_t first = 0; first < all.size(); first += static_cast<std::size_t>(experts)) {
    const auto of_rank = all.subspan(first, static_cast<std::size_t>(experts));
    fullest = std::max(fullest, padded(of_rank, problem.row_align));
  }
  Problem any = problem;
  any.capacity_rows = 0;
  return std::max(fullest, std::min(twice_balanced, capacity_rows(any, ranks)));
}

}  // namespace uniep::tool
