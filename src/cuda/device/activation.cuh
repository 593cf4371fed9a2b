#pragma once

#include <cuda_runtime.h>

namespace uniep::cuda {

// fp32, every product and sum rounded on its own (the translation units are compiled with
// -fmad=false), exp and division as accurate as the CUDA math library's.

/// Gates below this need the division's slow path: 1 / (1 + exp(-z)) comes near the subnormals.
inline constexpr float kLeastUsualGate = -86.0f;
__device__ __forceinline__ bool is_unusual_gate(float z) { return z < kLeastUsualGate; }

/// s[i] = 1 / (1 + exp(-z[i])). kUsual: no z is below kLeastUsualGate; then all elements take each
/// step of exp together, since a warp alone has nothing else to hide the latency of a step. The
/// steps are those of expf, 2^n 2^f with n + f = x log2(e), and of the division, without its test
/// for a slow path: 1 / x is exact to the last bit for 1 <= x <= 2^125.
template <bool kUsual, int kCount>
__device__ __forceinline__ void sigmoids(const float (&z)[kCount], float (&s)[kCount]) {
  if constexpr (!kUsual) {
    for (int i = 0; i < kCount; ++i) s[i] = 1.0f / (1.0f + expf(-z[i]));
  } else {
    constexpr float kShift = 12582913.0f;  // 1.5 2^23 + 1: what is added to it is rounded to n
    float n[kCount], f[kCount], x[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      float clamped;
      asm("fma.rn.sat.f32 %0, %1, 0f3bbb989d, 0f3f000000;" : "=f"(clamped) : "f"(-z[i]));
      n[i] = __fmaf_rd(clamped, 252.0f, kShift);
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      f[i] = __fmaf_rn(-z[i], 1.4426950216293334961f, -(n[i] - 12583039.0f));
      f[i] = __fmaf_rn(-z[i], 1.925963033500011079e-08f, f[i]);
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(x[i]) : "f"(f[i]));
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      x[i] = 1.0f + __uint_as_float(__float_as_uint(n[i]) << 23) * x[i];
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(s[i]) : "f"(x[i]));
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      s[i] = __fmaf_rn(s[i], __fmaf_rn(-x[i], s[i], 1.0f), s[i]);
    }
  }
}
__device__ __forceinline__ float silu(float z, float s) { return z * s; }
__device__ __forceinline__ float silu_grad(float z, float s) { return s * (1.0f + z * (1.0f - s)); }

}  // namespace uniep::cuda
