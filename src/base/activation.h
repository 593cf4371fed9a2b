#pragma once

#include "base/activation_math.h"
#include "uniep/problem.h"

namespace uniep {

// The activations, each in one place: what becomes of an element of h, and the derivative there, in
// fp32 and in the order of PyTorch's own kernels (docs/numerics.md). Of a gated one,
//
//   f(gate, up) = value(gate) value(up)    and of one without a gate    f(h) = value(h)
//
// `src/reference/exact_activation.h` has them in float64. A GPU takes exp, erf and tanh from the
// CUDA library, as PyTorch does (cuda/device/activation.cuh).

/// A function's value at an element, and its derivative.
struct ValueSlope {
  float value;
  float slope;
};

/// Whether gates end at a limit, and up halves at it and its negative.
constexpr bool is_limited(Activation activation) {
  return activation == Activation::kGptOss || activation == Activation::kSwigluClamped;
}
/// What such activations differ in.
struct Limits {
  float limit;
  float sigmoid_scale;  ///< a gate is multiplied by, for its sigmoid
  float up_offset;      ///< is added to an up half; -0 changes no bit
};
UNIEP_FORCE_INLINE UNIEP_HD constexpr Limits limits_of(Activation activation) {
  return activation == Activation::kGptOss ? Limits{7.0f, 1.702f, 1.0f}
                                           : Limits{10.0f, 1.0f, -0.0f};
}

/// The caps at which halves of kSwigluSoftcapped end softly.
inline constexpr int kGateSoftcap = 4;
inline constexpr int kUpSoftcap = 25;

/// exp, erf and tanh of those that have the same bits everywhere.
struct PortableMath {
  static UNIEP_FORCE_INLINE UNIEP_HD float exp(float z) { return exp_f32(z); }
  static UNIEP_FORCE_INLINE UNIEP_HD float erf(float z) { return erf_f32(z); }
  static UNIEP_FORCE_INLINE UNIEP_HD float tanh(float z) { return tanh_f32(z); }
};

namespace activations {

template <class Math>
UNIEP_FORCE_INLINE UNIEP_HD float sigmoid_of(float z) {
  return 1.0f / (1.0f + Math::exp(-z));
}

/// `s` is the sigmoid of z.
UNIEP_FORCE_INLINE UNIEP_HD ValueSlope silu_with(float z, float s) {
  return {z * s, s * (1.0f + z * (1.0f - s))};
}

/// z / 2 (1 + erf(z / sqrt 2)); its derivative is the normal distribution and z times its density.
template <class Math>
UNIEP_FORCE_INLINE UNIEP_HD ValueSlope gelu_at(float z, const Math& math) {
  constexpr float kRootHalf = 0.70710678118654752440f;
  constexpr float kDensity = 0.39894228040143267794f;  // 1 / sqrt(2 pi)
  const float above = 1.0f + math.erf(z * kRootHalf);
  const float density = Math::exp(-0.5f * z * z) * kDensity;
  return {z * 0.5f * above, 0.5f * above + z * density};
}

template <class Math>
UNIEP_FORCE_INLINE UNIEP_HD ValueSlope gelu_tanh_at(float z) {
  constexpr float kBeta = 0.79788456080286535588f;  // sqrt(2 / pi)
  constexpr float kKappa = 0.044715f;
  const float square = z * z;
  const float cube = square * z;
  const float t = Math::tanh(kBeta * (z + kKappa * cube));
  const float half = 0.5f * z;
  const float above = 1.0f + t;
  const float inner_slope = kBeta * (1.0f + 3.0f * kKappa * square);
  return {half * above, 0.5f * above + half * (1.0f - t * t) * inner_slope};
}

/// NaN stays NaN. At 0 the derivative is 0.
UNIEP_FORCE_INLINE UNIEP_HD ValueSlope relu_at(float z) {
  return {replace_if(z <= 0.0f, 0.0f, z), replace_if(z <= 0.0f, 0.0f, 1.0f)};
}

UNIEP_FORCE_INLINE UNIEP_HD ValueSlope relu2_at(float z) {
  const float r = relu_at(z).value;
  return {r * r, 2.0f * r};
}

UNIEP_FORCE_INLINE UNIEP_HD float limited(float z, const Limits& of) {
  return replace_if(z > of.limit, of.limit, z);
}
/// Beyond the limit the value stays, and the derivative is 0. `s` is the sigmoid of the limited z
/// times sigmoid_scale.
UNIEP_FORCE_INLINE UNIEP_HD ValueSlope limited_gate_with(float z, float s, const Limits& of) {
  const float g = limited(z, of);
  const float scaled = of.sigmoid_scale * g;
  return {g * s, replace_if(z > of.limit, 0.0f, s * (1.0f + scaled * (1.0f - s)))};
}

UNIEP_FORCE_INLINE UNIEP_HD ValueSlope limited_up_at(float z, const Limits& of) {
  const bool above = z > of.limit;
  const bool below = z < -of.limit;
  const float u = replace_if(below, -of.limit, replace_if(above, of.limit, z));
  return {u + of.up_offset, replace_if(above || below, 0.0f, 1.0f)};
}

/// kCap tanh(z / kCap), which is near z where z is small. z is multiplied by the inverse, as
/// PyTorch does on GPUs where it divides by a number.
template <int kCap, class Math>
UNIEP_FORCE_INLINE UNIEP_HD ValueSlope softcap_at(float z) {
  constexpr float kInverse = 1.0f / kCap;
  const float t = Math::tanh(z * kInverse);
  return {t * static_cast<float>(kCap), 1.0f - t * t};
}

/// softcap(z) sigmoid(z).
template <class Math>
UNIEP_FORCE_INLINE UNIEP_HD ValueSlope softcapped_gate_at(float z) {
  const ValueSlope capped = softcap_at<kGateSoftcap, Math>(z);
  const float s = sigmoid_of<Math>(z);
  return {capped.value * s, s * (capped.slope + capped.value * (1.0f - s))};
}

}  // namespace activations

/// Whether what becomes of an element of the gate half takes one sigmoid and nothing else, ...
constexpr bool has_sigmoid(Activation activation) {
  using enum Activation;
  return activation == kSwiglu || activation == kSilu || is_limited(activation);
}
/// ... which is of this, ...
template <Activation activation>
UNIEP_FORCE_INLINE UNIEP_HD float sigmoid_argument(float z, const Limits& of) {
  static_assert(has_sigmoid(activation));
  if constexpr (!is_limited(activation)) return z;
  return of.sigmoid_scale * activations::limited(z, of);
}
/// ... and the element's function, given the sigmoid `s` of that. `of`: of activations that are
/// limited, this one's, or another's in its place.
template <Activation activation>
UNIEP_FORCE_INLINE UNIEP_HD ValueSlope gate_with(float z, float s, const Limits& of) {
  static_assert(has_sigmoid(activation));
  if constexpr (!is_limited(activation)) return activations::silu_with(z, s);
  return activations::limited_gate_with(z, s, of);
}

/// What becomes of an element of the gate half; without a gate, of any element of h.
template <Activation activation, class Math = PortableMath>
UNIEP_FORCE_INLINE UNIEP_HD ValueSlope gate_at(float z, const Math& math = {}) {
  using enum Activation;
  if constexpr (has_sigmoid(activation)) {
    constexpr Limits kOf = limits_of(activation);
    const float s = activations::sigmoid_of<Math>(sigmoid_argument<activation>(z, kOf));
    return gate_with<activation>(z, s, kOf);
  }
  if constexpr (activation == kGeglu || activation == kGelu) return activations::gelu_at(z, math);
  if constexpr (activation == kGegluTanh) return activations::gelu_tanh_at<Math>(z);
  if constexpr (activation == kReglu) return activations::relu_at(z);
  if constexpr (activation == kSwigluSoftcapped) return activations::softcapped_gate_at<Math>(z);
  if constexpr (activation == kRelu2) return activations::relu2_at(z);
}

/// gate_at of an activation that is chosen when the program runs.
inline ValueSlope gate_at(Activation activation, float z) {
  using enum Activation;
  switch (activation) {
    case kSwiglu:
      return gate_at<kSwiglu>(z);
    case kGeglu:
      return gate_at<kGeglu>(z);
    case kGegluTanh:
      return gate_at<kGegluTanh>(z);
    case kReglu:
      return gate_at<kReglu>(z);
    case kGptOss:
      return gate_at<kGptOss>(z);
    case kSwigluClamped:
      return gate_at<kSwigluClamped>(z);
    case kSwigluSoftcapped:
      return gate_at<kSwigluSoftcapped>(z);
    case kRelu2:
      return gate_at<kRelu2>(z);
    case kGelu:
      return gate_at<kGelu>(z);
    case kSilu:
      return gate_at<kSilu>(z);
  }
  return {};
}

/// What becomes of an element of the up half.
template <Activation activation, class Math = PortableMath>
UNIEP_FORCE_INLINE UNIEP_HD ValueSlope up_at(float z, const Limits& of = limits_of(activation)) {
  if constexpr (is_limited(activation)) return activations::limited_up_at(z, of);
  if constexpr (activation == Activation::kSwigluSoftcapped) {
    return activations::softcap_at<kUpSoftcap, Math>(z);
  }
  return {z, 1.0f};
}
inline ValueSlope up_at(Activation activation, float z) {
  using enum Activation;
  if (activation == kGptOss) return up_at<kGptOss>(z);
  if (activation == kSwigluClamped) return up_at<kSwigluClamped>(z);
  return activation == kSwigluSoftcapped ? up_at<kSwigluSoftcapped>(z) : up_at<kSwiglu>(z);
}

}  // namespace uniep
