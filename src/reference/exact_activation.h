#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

#include "uniep/problem.h"

namespace uniep::reference {

// The activations and their derivatives in float64, from their definitions: what base/activation.h
// computes in fp32.

struct ExactValueSlope {
  double value;
  double slope;
};

namespace exact_activations {

inline double sigmoid(double z) { return 1 / (1 + std::exp(-z)); }

/// z s(z), with s' = s (1 - s).
inline ExactValueSlope silu(double z) {
  const double s = sigmoid(z);
  return {z * s, s * (1 + z * (1 - s))};
}

/// z times the normal distribution.
inline ExactValueSlope gelu(double z) {
  const double below = std::erfc(-z / std::numbers::sqrt2) / 2;
  const double density = std::exp(-z * z / 2) * std::numbers::inv_sqrtpi / std::numbers::sqrt2;
  return {z * below, below + z * density};
}

/// z / 2 (1 + tanh(c (z + 0.044715 z^3))), c = sqrt(2 / pi); (1 + tanh(v)) / 2 = sigmoid(2 v).
inline ExactValueSlope gelu_tanh(double z) {
  const double c = std::numbers::sqrt2 * std::numbers::inv_sqrtpi;
  const double s = sigmoid(2 * c * (z + 0.044715 * z * z * z));
  return {z * s, s + z * s * (1 - s) * 2 * c * (1 + 3 * 0.044715 * z * z)};
}

inline ExactValueSlope relu(double z) { return {std::max(z, 0.0), z > 0 ? 1.0 : 0.0}; }

inline ExactValueSlope relu2(double z) {
  const double r = std::max(z, 0.0);
  return {r * r, 2 * r};
}

/// The value at which a gate and an up half end; infinity: nowhere.
constexpr double limit_of(Activation activation) {
  if (activation == Activation::kGptOss) return 7;
  if (activation == Activation::kSwigluClamped) return 10;
  return std::numeric_limits<double>::infinity();
}

/// g sigmoid(alpha g) of g = min(z, limit).
inline ExactValueSlope limited_gate(double z, double limit, double alpha) {
  const ExactValueSlope scaled = silu(alpha * std::min(z, limit));
  return {scaled.value / alpha, z > limit ? 0 : scaled.slope};
}

/// cap tanh(z / cap).
inline ExactValueSlope softcap(double z, double cap) {
  const double t = std::tanh(z / cap);
  return {cap * t, 1 - t * t};
}

/// 4 tanh(z / 4) sigmoid(z).
inline ExactValueSlope softcapped_gate(double z) {
  const ExactValueSlope capped = softcap(z, 4);
  const double s = sigmoid(z);
  return {capped.value * s, capped.slope * s + capped.value * s * (1 - s)};
}

}  // namespace exact_activations

/// What becomes of an element of the gate half; without a gate, of any element of h.
inline ExactValueSlope exact_gate(Activation activation, double z) {
  switch (activation) {
    case Activation::kSwiglu:
    case Activation::kSilu:
      return exact_activations::silu(z);
    case Activation::kGeglu:
    case Activation::kGelu:
      return exact_activations::gelu(z);
    case Activation::kGegluTanh:
      return exact_activations::gelu_tanh(z);
    case Activation::kReglu:
      return exact_activations::relu(z);
    case Activation::kGptOss:
      return exact_activations::limited_gate(z, exact_activations::limit_of(activation), 1.702);
    case Activation::kSwigluClamped:
      return exact_activations::limited_gate(z, exact_activations::limit_of(activation), 1);
    case Activation::kSwigluSoftcapped:
      return exact_activations::softcapped_gate(z);
    case Activation::kRelu2:
      return exact_activations::relu2(z);
  }
  return {};
}

/// What becomes of an element of the up half.
inline ExactValueSlope exact_up(Activation activation, double z) {
  if (activation == Activation::kSwigluSoftcapped) return exact_activations::softcap(z, 25);
  const double limit = exact_activations::limit_of(activation);
  const double offset = activation == Activation::kGptOss ? 1 : 0;
  return {std::clamp(z, -limit, limit) + offset, std::abs(z) > limit ? 0.0 : 1.0};
}

}  // namespace uniep::reference
