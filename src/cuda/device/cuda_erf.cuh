#pragma once

#include <cuda_runtime.h>

#include "cuda/erf_coefficients.h"

// erf with the bits of CUDA's erff, whichever nvcc compiles this: PyTorch's operators have that of
// the CUDA that they were built with. Steps and coefficients are those that nvcc makes of erff.

namespace uniep::cuda {

/// Near: x + x P(x^2). Far: 1 - 2^-(|x| + |x| P(|x|)), with the sign of x.
__device__ __forceinline__ float cuda_erf(float x, const ErfCoefficients& coefficients) {
  const bool far = fabsf(x) >= coefficients.begin_of_far;
  const float t = far ? fabsf(x) : x * x;
  const float(&near_of)[7] = coefficients.of[0];
  const float(&far_of)[7] = coefficients.of[1];
  float p = far ? far_of[0] : near_of[0];
#pragma unroll
  for (int i = 1; i < 7; ++i) p = __fmaf_rn(p, t, far ? far_of[i] : near_of[i]);
  const float near = __fmaf_rn(p, x, x);
  if (!far) return near;
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(-fabsf(near)));
  return copysignf(1.0f - power, x);
}

}  // namespace uniep::cuda
