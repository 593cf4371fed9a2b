#pragma once

#include <cstdint>

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

}  // namespace uniep
