#pragma once

#include "cuda/device/activation.cuh"
#include "cuda/device/gemm.cuh"

// What the epilogues of fc1 and dfc2, which both apply SwiGLU, share.

namespace uniep::cuda {

/// Probabilities of the two rows of a tile of which a consumer thread holds elements: row lane / 4
/// of the warp's 16, and the row 8 below. Pair i of a fragment lies in row i % 2 of them.
struct RowProbs {
  float of[2];
};

/// Whether any of the warp's gates needs the slow path of the sigmoid.
template <int kCount>
__device__ __forceinline__ bool any_unusual_gate(const std::uint32_t (&gates)[kCount]) {
  std::uint32_t least = gates[0];
#pragma unroll
  for (int i = 1; i < kCount; ++i) least = min_pair(least, gates[i]);
  const bool any = is_unusual_gate(low_of(least)) || is_unusual_gate(high_of(least));
  return __any_sync(0xffffffffu, any) != 0;
}

}  // namespace uniep::cuda
