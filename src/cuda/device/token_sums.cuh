#pragma once

#include "base/contract.h"
#include "base/math.h"
#include "cuda/device/vectors.cuh"

// The sum of a token's rows, vector by vector: what stage reduce makes of rows that were pushed,
// and add_rows of rows that lie anywhere.

namespace uniep::cuda {

/// Adds slots [begin, end) of a token, k ascending, of whose vectors load(k) is that of slot k. Bit
/// k of `slots`: slot k is added, times factors[k] where there are factors.
template <bool kGeneral, class Load>
__device__ __forceinline__ void add_slots(float (&total)[kVectorElements], Load&& load, int begin,
                                          int end, unsigned slots, const float* factors) {
  constexpr int kAhead = 4;  // loads under way
  for (int first = begin; first < end; first += kAhead) {
    Vector ahead[kAhead];
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      if (first + k < end) ahead[k] = load(first + k);
    }
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      if (first + k >= end || (slots >> (first + k) & 1) == 0) continue;
      add_vector(total, ahead[k], kGeneral && factors ? __ldg(factors + first + k) : 1.0f);
    }
  }
}

/// A token's combine groups, ascending, as bits of its slots (contract.h). Without groups its kept
/// slots are one. Behind them come those of shared experts, if there are any.
class GroupsOfToken {
 public:
  /// `ids`: of its K slots; `group_experts`: of a group, 0: all are one.
  __device__ __forceinline__ GroupsOfToken(const std::int32_t* ids, int topk, int group_experts,
                                           unsigned kept)
      : ids_(ids), topk_(topk), group_experts_(group_experts), left_(kept) {}

  /// The next group's slots; 0: there are no more.
  __device__ __forceinline__ unsigned next() {
    unsigned slots = left_ & ((1u << topk_) - 1);
    if (group_experts_ > 0 && slots != 0) {
      const ExpertRange group = next_combine_group(ids_, topk_, group_experts_, from_);
      slots = 0;
      for (int k = 0; k < topk_; ++k) slots |= (group.has(ids_[k]) ? 1u : 0u) << k;
      from_ = group.end;
    }
    if (slots == 0) slots = left_;
    left_ &= ~slots;
    return slots;
  }

 private:
  const std::int32_t* ids_;
  int topk_, group_experts_;
  std::int32_t from_ = 0;
  unsigned left_;  // of the token's kept slots
};

/// total += part, as partial sums are added up.
__device__ __forceinline__ void add_partial(float (&total)[kVectorElements],
                                            const float (&part)[kVectorElements], bool rounded) {
#pragma unroll
  for (int i = 0; i < kVectorElements; i += 2) {
    const std::uint32_t pair = pack_pair(part[i], part[i + 1]);
    total[i] = total[i] + (rounded ? low_of(pair) : part[i]);
    total[i + 1] = total[i + 1] + (rounded ? high_of(pair) : part[i + 1]);
  }
}

__device__ __forceinline__ Vector rounded_vector(const float (&sums)[kVectorElements]) {
  return {pack_pair(sums[0], sums[1]), pack_pair(sums[2], sums[3]), pack_pair(sums[4], sums[5]),
          pack_pair(sums[6], sums[7])};
}

__device__ __forceinline__ void round_sums(float (&sums)[kVectorElements]) {
#pragma unroll
  for (int i = 0; i < kVectorElements; i += 2) {
    const std::uint32_t pair = pack_pair(sums[i], sums[i + 1]);
    sums[i] = low_of(pair);
    sums[i + 1] = high_of(pair);
  }
}

}  // namespace uniep::cuda
