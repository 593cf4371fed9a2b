#pragma once

#include <cmath>

#include "base/activation.h"
#include "reference/exact_activation.h"
#include "reference/matrix.h"
#include "uniep/bf16.h"

namespace uniep::reference {

// The stages are written once, as templates over one of these or over that of bounded.cpp: in which
// numbers to compute, what memory keeps of a number, and the activation functions: of an element of
// the gate half (or of all of h) and of the up half, and their derivatives.

/// float64, rounded nowhere.
struct ExactArithmetic {
  using Number = double;

  static double stored(double v) { return v; }
  static double gate(Activation a, double z) { return exact_gate(a, z).value; }
  static double gate_slope(Activation a, double z) { return exact_gate(a, z).slope; }
  static double up(Activation a, double z) { return exact_up(a, z).value; }
  static double up_slope(Activation a, double z) { return exact_up(a, z).slope; }
};

/// The numerics contract: fp32, and bf16 wherever an unfused layer would write a tensor.
struct ContractArithmetic {
  using Number = float;

  static float stored(float v) { return to_float(to_bf16(v)); }
  static float gate(Activation a, float z) { return gate_at(a, z).value; }
  static float gate_slope(Activation a, float z) { return gate_at(a, z).slope; }
  static float up(Activation a, float z) { return up_at(a, z).value; }
  static float up_slope(Activation a, float z) { return up_at(a, z).slope; }
};

/// What memory keeps of every element.
template <class Arithmetic, class T>
Matrix<T> stored(Matrix<T> m) {
  for (T& v : m.values) v = Arithmetic::stored(v);
  return m;
}

}  // namespace uniep::reference
