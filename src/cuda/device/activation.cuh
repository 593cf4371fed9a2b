#pragma once

#include <cuda_runtime.h>

#include "base/activation.h"
#include "cuda/device/cuda_erf.cuh"

namespace uniep::cuda {

// fp32, every product and sum rounded on its own (the translation units are compiled with
// -fmad=false), exp and division as accurate as the CUDA math library's.

/// Gates beyond this, and NaNs, take the math library's way: 1 / (1 + exp(-z)) or exp(-z) itself
/// comes near the subnormals.
inline constexpr float kLargestUsualGate = 86.0f;
template <Activation activation = Activation::kSwiglu>
__device__ __forceinline__ bool is_unusual_gate(float z) {
  // The largest scale of activations that are limited.
  constexpr float kScale =
      is_limited(activation) ? limits_of(Activation::kGptOss).sigmoid_scale : 1.0f;
  return !(fabsf(z) <= kLargestUsualGate / kScale);
}

/// exp(-z) for a usual z, with the bits of expf(-z), whose steps these are: -z log2(e) = n + f, and
/// 2^f comes from the hardware. Only that 2^n is added to the exponent, not multiplied with, which
/// takes one instruction less. n is the floor of a product that was rounded on the way; where it is
/// found in another way, the last bit of the sum below differs for some z.
__device__ __forceinline__ float usual_exp_of_minus(float z) {
  constexpr float kLog2E = 1.44269502f, kLog2ERest = 1.92596303e-8f;
  constexpr float kIntegers = 0x1.8p23f;  // what is added to it, is rounded to integers
  const float part = __saturatef(__fmaf_rn(-z, kLog2E / 252, 0.5f));
  const float shifted = __fmaf_rd(part, 252.0f, kIntegers - 126);
  const float n = shifted - kIntegers;
  const float f = __fmaf_rn(-z, kLog2ERest, __fmaf_rn(-z, kLog2E, -n));
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(f));
  return __uint_as_float(__float_as_uint(power) + (__float_as_uint(shifted) << 23));
}

/// 1 / x, rounded to nearest, for 1 <= x <= 2^125: the steps of the compiler's own division, but
/// without its test for a slow path, whose branch would keep the elements of an epilogue from being
/// computed side by side.
__device__ __forceinline__ float usual_reciprocal(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return __fmaf_rn(r, __fmaf_rn(-x, r, 1.0f), r);
}

/// 1 / (1 + exp(-z)). kUsual: z is not unusual.
template <bool kUsual>
__device__ __forceinline__ float sigmoid(float z) {
  const float x = 1.0f + (kUsual ? usual_exp_of_minus(z) : expf(-z));
  return kUsual ? usual_reciprocal(x) : 1.0f / x;
}

/// z[i] = sigmoid(z[i]), step by step for all of them: one after another, a warp would wait for
/// each step's result.
template <bool kUsual, int kCount>
__device__ __forceinline__ void sigmoids(float (&z)[kCount]) {
#pragma unroll
  for (float& v : z) v = kUsual ? usual_exp_of_minus(v) : expf(-v);
#pragma unroll
  for (float& v : z) v = 1.0f + v;
#pragma unroll
  for (float& v : z) v = kUsual ? usual_reciprocal(v) : 1.0f / v;
}

/// The CUDA library's, which PyTorch's operators call too. The host, for which this is compiled as
/// well, runs none of it.
struct DeviceMath {
  const ErfCoefficients& coefficients;
#ifdef __CUDA_ARCH__
  static UNIEP_FORCE_INLINE UNIEP_HD float exp(float z) { return expf(z); }
  UNIEP_FORCE_INLINE UNIEP_HD float erf(float z) const { return cuda_erf(z, coefficients); }
  static UNIEP_FORCE_INLINE UNIEP_HD float tanh(float z) { return tanhf(z); }
#else
  static UNIEP_FORCE_INLINE UNIEP_HD float exp(float z) { return exp_f32(z); }
  UNIEP_FORCE_INLINE UNIEP_HD float erf(float z) const { return erf_f32(z); }
  static UNIEP_FORCE_INLINE UNIEP_HD float tanh(float z) { return tanh_f32(z); }
#endif
};

/// Calls f.operator()<activation>() for the one at hand; <kGptOss> for any that is limited, which
/// DeviceContext::limits then tells from others: kernels with 256 columns have no registers for
/// another one. All threads have the same: the branch costs them nothing else. `kGeneral`: it may
/// be any; else it is SwiGLU.
template <bool kGeneral, class F>
__device__ __forceinline__ void with_activation(Activation activation, F&& f) {
  switch (kGeneral ? activation : Activation::kSwiglu) {
    case Activation::kSwiglu:
      f.template operator()<Activation::kSwiglu>();
      break;
    case Activation::kGeglu:
      f.template operator()<Activation::kGeglu>();
      break;
    case Activation::kGegluTanh:
      f.template operator()<Activation::kGegluTanh>();
      break;
    case Activation::kReglu:
      f.template operator()<Activation::kReglu>();
      break;
    case Activation::kGptOss:
    case Activation::kSwigluClamped:
      f.template operator()<Activation::kGptOss>();
      break;
    case Activation::kSwigluSoftcapped:
      f.template operator()<Activation::kSwigluSoftcapped>();
      break;
    case Activation::kRelu2:
      f.template operator()<Activation::kRelu2>();
      break;
    case Activation::kGelu:
      f.template operator()<Activation::kGelu>();
      break;
    case Activation::kSilu:
      f.template operator()<Activation::kSilu>();
  }
}

}  // namespace uniep::cuda
