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

/// a + b of both halves, rounded once: to the bits of the sum in fp32, rounded, since that has more
/// than twice the digits.
__device__ __forceinline__ std::uint32_t add_pairs(std::uint32_t a, std::uint32_t b) {
  const __nv_bfloat162 sum = __hadd2_rn(*reinterpret_cast<const __nv_bfloat162*>(&a),
                                        *reinterpret_cast<const __nv_bfloat162*>(&b));
  return *reinterpret_cast<const std::uint32_t*>(&sum);
}

/// Neighbouring elements of bf16.
using Vector = uint4;
inline constexpr int kVectorElements = static_cast<int>(sizeof(Vector)) / kBf16Bytes;

/// sum[i] += factor v[i] for 8 elements.
__device__ __forceinline__ void add_vector(float (&sum)[kVectorElements], const Vector& v,
                                           float factor = 1.0f) {
  const std::uint32_t pairs[] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum[2 * i] = sum[2 * i] + factor * low_of(pairs[i]);
    sum[2 * i + 1] = sum[2 * i + 1] + factor * high_of(pairs[i]);
  }
}

}  // namespace uniep::cuda
