// How many rows a rank has memory for.
#include "base/expert_numbers.h"
#include "base/problem_limits.h"
#include "graph/extents.h"
#include "graph/layer_graph.h"

namespace uniep {
namespace {

std::int64_t most_padding(const Problem& p, int num_ranks) {
  return expert_numbers(p, num_ranks).of_rank() * (p.row_align - std::int64_t{1});
}

}  // namespace

std::int64_t rows_of_any_routing(const Problem& p, int num_ranks) {
  validate(p, num_ranks);
  // The same expert may be named twice by a token, so K bounds a token's copies, not min(K, El).
  return (std::int64_t{num_ranks} * p.topk + p.shared_experts) * p.max_tokens +
         most_padding(p, num_ranks);
}

std::int64_t capacity_rows(const Problem& p, int num_ranks) {
  validate(p, num_ranks);
  if (p.capacity_rows > 0) return p.capacity_rows;
  const std::int64_t any_routing = rows_of_any_routing(p, num_ranks);
  const std::int64_t of_row = bytes_of_row(kLayerGraph, extents_of(p, num_ranks, 0));
  const bool small = any_routing <= kSmallLayerBytes / of_row;
  const std::int64_t usual =
      (kDefaultLoad * p.topk + p.shared_experts) * p.max_tokens + most_padding(p, num_ranks);
  const std::int64_t rows = small ? any_routing : min_of(any_routing, usual);
  return min_of(rows, kMaxCapacityRows);
}

}  // namespace uniep
