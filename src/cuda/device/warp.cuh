#pragma once

#include <cstdint>

namespace uniep::cuda {

/// The value, of which the compiler knows nothing ahead of this place. What follows from it is
/// computed behind it, even within a loop, and takes no registers ahead of the loop.
__device__ __forceinline__ int known_here(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

inline constexpr unsigned kWholeWarp = 0xffffffffu;

__device__ inline int lane_index() { return static_cast<int>(threadIdx.x % 32); }
__device__ inline int warp_index() { return static_cast<int>(threadIdx.x / 32); }
__device__ inline unsigned lanes_below(int lane) { return (1u << lane) - 1; }

/// Sum over the lanes up to and including this one.
template <class T>
__device__ T warp_inclusive_sum(T value) {
  for (int step = 1; step < 32; step *= 2) {
    const T below = __shfl_up_sync(kWholeWarp, value, step);
    if (lane_index() >= step) value += below;
  }
  return value;
}

template <class T>
__device__ T warp_sum(T value) {
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(kWholeWarp, value, step);
  return value;
}

}  // namespace uniep::cuda
