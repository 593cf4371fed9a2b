#pragma once

#include <cmath>

#include "base/activation_math.h"
#include "reference/matrix.h"
#include "uniep/bf16.h"

namespace uniep::reference {

// The stages are written once, as templates over one of these or over that of bounded.cpp: in which
// numbers to compute, what memory keeps of a number, and the activation function.

/// float64, rounded nowhere.
struct ExactArithmetic {
  using Number = double;

  static double stored(double v) { return v; }
  static double sigmoid(double z) { return 1 / (1 + std::exp(-z)); }
  static double silu(double z) { return z * sigmoid(z); }
  /// d/dz of z s(z), with s' = s (1 - s).
  static double silu_grad(double z) {
    const double s = sigmoid(z);
    return s * (1 + z * (1 - s));
  }
};

/// The numerics contract: fp32, and bf16 wherever an unfused layer would write a tensor.
struct ContractArithmetic {
  using Number = float;

  static float stored(float v) { return to_float(to_bf16(v)); }
  static float silu(float z) { return uniep::silu(z); }
  static float silu_grad(float z) { return uniep::silu_grad(z); }
};

/// What memory keeps of every element.
template <class Arithmetic, class T>
Matrix<T> stored(Matrix<T> m) {
  for (T& v : m.values) v = Arithmetic::stored(v);
  return m;
}

}  // namespace uniep::reference
