#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "graph/element.h"

// bf16 by pairs in a register, and by vectors of 16 bytes.

namespace uniep::cuda {

inline constexpr int kBf16Bytes = static_cast<int>(bytes_of(Element::kBf16));

__device__ __forceinline__ std::uint32_t pack_pair(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const std::uint32_t*>(&pair);
}
__device__ __forceinline__ float low_of(std::uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_of(std::uint32_t pair) {
  return __uint_as_float(pair & 0xffff0000u);
}

/// Neighbouring elements of bf16.
using Vector = uint4;
inline constexpr int kVectorElements = static_cast<int>(sizeof(Vector)) / kBf16Bytes;

}  // namespace uniep::cuda
