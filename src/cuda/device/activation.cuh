#pragma once

#include <cuda_runtime.h>

namespace uniep::cuda {

// fp32, every product and sum rounded on its own (the translation units are compiled with
// -fmad=false), exp and division as accurate as the CUDA math library's.

/// Gates below this need the division's slow path: 1 / (1 + exp(-z)) comes near the subnormals.
inline constexpr float kLeastUsualGate = -86.0f;
__device__ __forceinline__ bool is_unusual_gate(float z) { return z < kLeastUsualGate; }

/// 1 / x, rounded to nearest, for 1 <= x <= 2^125: the steps of the compiler's own division, but
/// without its test for a slow path, whose branch would keep the elements of an epilogue from being
/// computed side by side.
__device__ __forceinline__ float usual_reciprocal(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return __fmaf_rn(r, __fmaf_rn(-x, r, 1.0f), r);
}

/// 1 / (1 + exp(-z)). kUsual: z is a NaN, or not below kLeastUsualGate.
template <bool kUsual>
__device__ __forceinline__ float sigmoid(float z) {
  const float x = 1.0f + expf(-z);
  return kUsual ? usual_reciprocal(x) : 1.0f / x;
}

/// z[i] = sigmoid(z[i]), step by step for all of them: one after another, a warp would wait for
/// each step's result.
template <bool kUsual, int kCount>
__device__ __forceinline__ void sigmoids(float (&z)[kCount]) {
#pragma unroll
  for (float& v : z) v = expf(-v);
#pragma unroll
  for (float& v : z) v = 1.0f + v;
#pragma unroll
  for (float& v : z) v = kUsual ? usual_reciprocal(v) : 1.0f / v;
}

__device__ __forceinline__ float silu(float z, float s) { return z * s; }
__device__ __forceinline__ float silu_grad(float z, float s) { return s * (1.0f + z * (1.0f - s)); }

}  // namespace uniep::cuda
