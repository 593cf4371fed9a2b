#pragma once

#include "base/contract.h"
#include "base/math.h"
#include "graph/graph.h"
#include "uniep/problem.h"

namespace uniep {

/// Smallest values of the axes that sizes depend on: with these the counters are most numerous.
inline constexpr std::int64_t kMinTileM = 16;
inline constexpr std::int64_t kMinTokenBlock = 1;
inline constexpr std::int64_t kMostWaves = 16;

/// The extents of a problem in numbers.
struct Extents {
  std::int64_t of[kNumExtents] = {};

  UNIEP_HD std::int64_t operator[](Extent extent) const { return of[static_cast<int>(extent)]; }
  UNIEP_HD std::int64_t& operator[](Extent extent) { return of[static_cast<int>(extent)]; }
};

/// The extents that follow from the layer's widths and arithmetic alone. `halves`: 1 without a
/// gate.
inline Extents extents_of_widths(int topk, int shared, std::int64_t hidden,
                                 std::int64_t intermediate, int halves = 2, bool has_bias = false,
                                 int result_rows = 1) {
  Extents e;
  e[Extent::kOne] = 1;
  e[Extent::kHalves] = halves;
  e[Extent::kTopk] = topk;
  e[Extent::kShared] = shared;
  e[Extent::kSlots] = topk + shared;
  e[Extent::kResultRows] = result_rows;
  e[Extent::kHidden] = hidden;
  e[Extent::kIntermediate] = intermediate;
  e[Extent::kBothHalves] = halves * intermediate;
  e[Extent::kDprobGroups] = dprob_sums(intermediate, has_bias);
  return e;
}

/// Most tokens of which that many rows of a rank can be copies.
inline std::int64_t most_received(const Problem& p, int num_ranks, std::int64_t rows) {
  return min_of<std::int64_t>(rows, num_ranks * p.max_tokens);
}

/// The extents of memory for `rows` rows and as many tokens as a rank may hold.
inline Extents extents_of(const Problem& p, int num_ranks, std::int64_t rows, int hosts = 1) {
  Extents e = extents_of_widths(p.topk, p.shared_experts, p.hidden, p.intermediate, halves(p),
                                p.bias, result_rows(p));
  e[Extent::kTokens] = p.max_tokens;
  e[Extent::kRows] = rows;
  e[Extent::kReceived] = most_received(p, num_ranks, rows);
  e[Extent::kLocalExperts] = p.num_experts / num_ranks;
  e[Extent::kRanks] = num_ranks;
  e[Extent::kTokenBlocks] = ceil_div(p.max_tokens, kMinTokenBlock);
  e[Extent::kRowGroups] = ceil_div(rows, kMinTileM);
  e[Extent::kHosts] = hosts > 1 ? hosts : 0;
  return e;
}

/// Elements of the tensor.
inline std::int64_t elements_of(const TensorRow& tensor, const Extents& extents) {
  std::int64_t count = 1;
  for (const Extent e : tensor.shape) count *= extents[e];
  return count;
}

/// Most counters of that kind.
inline std::int64_t counters_of(CounterOf of, const Extents& e) {
  switch (of) {
    case CounterOf::kSource:
      return e[Extent::kRanks];
    case CounterOf::kRowGroup:
    case CounterOf::kTile:
      return e[Extent::kRowGroups];
    case CounterOf::kExpert:
    case CounterOf::kExpertRows:
    case CounterOf::kExpertUses:
      return e[Extent::kLocalExperts] + e[Extent::kShared];
    case CounterOf::kTokenBlock:
      return e[Extent::kTokenBlocks] * e[Extent::kRanks];
    case CounterOf::kCrossing:
    case CounterOf::kPiece:
      if (e[Extent::kHosts] == 0) return 0;
      return e[Extent::kRanks] * (e[Extent::kLocalExperts] + e[Extent::kShared]) * kMostWaves;
    case CounterOf::kReturn:
      return e[Extent::kTokenBlocks] * e[Extent::kHosts];
  }
  return 0;
}

/// Bytes of the layer's own tensors that one row adds to, saved or of a call.
inline std::int64_t bytes_of_row(const Graph& graph, const Extents& extents) {
  Extents of_row = extents;
  of_row[Extent::kRows] = 1;
  std::int64_t bytes = 0;
  for (int i = 0; i < graph.num_tensors; ++i) {
    const TensorRow& t = graph.tensors[i];
    if (t.region == Region::kCallers || !has_extent(t, Extent::kRows)) continue;
    bytes += elements_of(t, of_row) * bytes_of(t.element);
  }
  return bytes;
}

}  // namespace uniep
