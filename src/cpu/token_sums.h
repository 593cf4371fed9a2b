#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "base/contract.h"
#include "cpu/kernels/kernels.h"

// The sum of a token's rows: what stage reduce makes of rows that were pushed, and add_rows of rows
// that lie anywhere.

namespace uniep::cpu {

inline constexpr ExpertRange kAllExperts{0, std::numeric_limits<std::int32_t>::max()};

/// Calls f(group) for a token's combine groups, ascending. `ids`: of its K slots.
template <class F>
void for_each_group(const std::int32_t* ids, int topk, int group_experts, F&& f) {
  const auto next = [&](std::int32_t from) {
    return next_combine_group(ids, topk, group_experts, from);
  };
  for (ExpertRange group = next(0); !group.is_empty(); group = next(group.end)) f(group);
}

/// sum += the row of a slot, times its probability where there is one.
inline void add_slot(const Kernels& kernels, std::int64_t hidden, const bf16* row,
                     const float* prob, float* sum) {
  if (prob != nullptr) {
    kernels.add_scaled_row(hidden, sum, row, *prob);
  } else {
    kernels.add_row(hidden, sum, row);
  }
}

/// sum += the sum of a group, as partial sums are added up; `rounds`: to bf16, in `rounded`.
inline void add_partial(const Kernels& kernels, std::int64_t hidden, const float* part, bool rounds,
                        std::vector<bf16>& rounded, float* sum) {
  if (!rounds) return kernels.add_f32_row(hidden, sum, part);
  rounded.resize(static_cast<std::size_t>(hidden));
  kernels.round_row(hidden, part, rounded.data());
  kernels.add_row(hidden, sum, rounded.data());
}

}  // namespace uniep::cpu
