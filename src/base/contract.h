#pragma once

#include <cstdint>
#include <limits>

#include "base/math.h"

namespace uniep {

/// dprobs of a row is summed in groups of this many columns of I, then over groups in ascending
/// order, whatever the tile shape. Inside a group, on the CPU: lane l of kDprobLanes sums columns
/// l, l + kDprobLanes, ... ascending, then lanes are added pairwise: l and l + 8, l and l + 4, l
/// and l + 2, l and l + 1. On a GPU: each of the four threads that hold a row sums its columns
/// ascending, then pairwise. Columns past I count as +0.
inline constexpr std::int64_t kDprobGroup = 64;
inline constexpr std::int64_t kDprobLanes = 16;

/// Groups of a row.
constexpr UNIEP_HD std::int64_t dprob_groups(std::int64_t intermediate) {
  return ceil_div(intermediate, kDprobGroup);
}
/// Numbers that the dprob of a row is the sum of: groups of columns of I, then the part of b2.
constexpr UNIEP_HD std::int64_t dprob_sums(std::int64_t intermediate, bool has_bias) {
  return dprob_groups(intermediate) + (has_bias ? 1 : 0);
}

/// Bias gradients, sums over an expert's rows, are summed in groups of this many rows in canonical
/// order, then over groups ascending. Inside a group partial sum q of kBiasPartials takes rows
/// 8 m + 2 q and the next, m ascending; then they are added pairwise: q and q + 1, then q and q
/// + 2.
inline constexpr int kBiasRows = 64;
inline constexpr int kBiasPartials = 4;

/// Row number i of a group's partial sum.
constexpr UNIEP_HD int bias_row(int partial, int i) { return i / 2 * 8 + 2 * partial + i % 2; }

/// Experts [begin, end).
struct ExpertRange {
  std::int32_t begin, end;
  constexpr UNIEP_HD bool has(std::int32_t expert) const { return begin <= expert && expert < end; }
  constexpr UNIEP_HD bool is_empty() const { return begin >= end; }
};

/// The first combine group (Problem::combine_groups: runs of `group_experts` experts each) at or
/// behind expert `from` that a token has a slot in; empty if it has none. From expert 0 on, and
/// then from the end of each, that is all of the token's groups, ascending. `ids`: of its K slots.
constexpr UNIEP_HD ExpertRange next_combine_group(const std::int32_t* ids, int topk,
                                                  int group_experts, std::int32_t from) {
  std::int32_t least = std::numeric_limits<std::int32_t>::max();
  for (int k = 0; k < topk; ++k) {
    if (ids[k] >= from && ids[k] < least) least = ids[k];
  }
  if (least == std::numeric_limits<std::int32_t>::max()) return {0, 0};
  const std::int32_t begin = least / group_experts * group_experts;
  return {begin, begin + group_experts};
}

}  // namespace uniep
