#include "reference/bounded.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "reference/arithmetic.h"
#include "reference/layer.h"

namespace uniep::reference {
namespace {

constexpr double kBf16Unit = 0x1p-9;    // half a unit in the last place, of 8 bits
constexpr double kFp32Unit = 0x1p-22;   // tensor cores keep a bit or two less than fp32's 24
constexpr double kSmallest = 0x1p-126;  // below, places have a fixed size: of bf16 and fp32 alike

double squared(double v) { return v * v; }

/// A rounding by `unit` of a number that may be off already.
double rounding(const Bounded& v, double unit) {
  return squared(unit * std::max(std::abs(v.value) + std::sqrt(v.square), kSmallest));
}

Bounded in_fp32(Bounded v) {
  v.square += rounding(v, kFp32Unit);
  return v;
}

/// f(z), where the first two derivatives are `slope` at z and at most `bend` anywhere.
Bounded mapped(double value, double slope, double bend, const Bounded& z) {
  return in_fp32({value, squared(slope) * z.square + squared(bend * z.square / 2)});
}

constexpr double kNowhere = std::numeric_limits<double>::infinity();

/// Bounds of the function of an activation's gate: no less than the largest second and third
/// derivative, and where its first one has a step.
struct Bends {
  double value;
  double slope;
  double step_at = kNowhere;
  bool cancels = false;  ///< fp32 has it, or its derivative, as a sum that cancels far from 0
};

Bends bends_of(Activation activation) {
  switch (activation) {
    case Activation::kSwiglu:
    case Activation::kSilu:
      return {0.5, 0.31};
    case Activation::kGeglu:
    case Activation::kGegluTanh:
    case Activation::kGelu:
      return {0.8, 0.78, kNowhere, true};
    case Activation::kReglu:
      return {0, 0, 0};
    case Activation::kGptOss:  // silu(1.702 z) / 1.702, to its limit
      return {0.86, 0.9, exact_activations::limit_of(activation)};
    case Activation::kSwigluClamped:
      return {0.5, 0.31, exact_activations::limit_of(activation)};
    case Activation::kSwigluSoftcapped:
      return {0.51, 0.43, kNowhere, true};
    case Activation::kRelu2:
      return {2, 0};
  }
  return {};
}

/// The bounds of the function of an up half; nothing if that is taken as it is.
std::optional<Bends> bends_of_up(Activation activation) {
  const double limit = exact_activations::limit_of(activation);
  if (limit != kNowhere) return Bends{0, 0, limit};
  if (activation == Activation::kSwigluSoftcapped) return Bends{0.031, 0.0033, kNowhere, true};
  return std::nullopt;
}

/// A derivative at `z` that has a step, of about 1 at most, within reach of z's error.
Bounded with_step(Bounded derivative, double at, const Bounded& z) {
  if (std::abs(z.value - at) <= 3 * std::sqrt(z.square)) derivative.square += 1;
  return derivative;
}

/// `terms`: how large the terms of the sum that cancels are.
Bounded with_cancellation(Bounded v, const Bends& bends, double terms) {
  if (bends.cancels) v.square += squared(kFp32Unit * terms);
  return v;
}

struct BoundedArithmetic {
  using Number = Bounded;

  static Bounded stored(const Bounded& v) { return rounded_to_bf16(v); }
  static Bounded gate(Activation a, const Bounded& z) {
    const ExactValueSlope exact = exact_gate(a, z.value);
    const Bends bends = bends_of(a);
    // z times a sum, so that near 0 nothing is lost.
    const Bounded smooth = mapped(exact.value, exact.slope, bends.value, z);
    return with_cancellation(smooth, bends, std::abs(z.value));
  }
  static Bounded gate_slope(Activation a, const Bounded& z) {
    const Bends bends = bends_of(a);
    const double slope = exact_gate(a, z.value).slope;
    const Bounded smooth = mapped(slope, bends.value, bends.slope, z);
    return with_step(with_cancellation(smooth, bends, 1 + std::abs(z.value)), bends.step_at, z);
  }
  static Bounded up(Activation a, const Bounded& z) {
    const std::optional<Bends> bends = bends_of_up(a);
    if (!bends) return z;
    const ExactValueSlope exact = exact_up(a, z.value);
    return mapped(exact.value, exact.slope, bends->value, z);
  }
  static Bounded up_slope(Activation a, const Bounded& z) {
    const double slope = exact_up(a, z.value).slope;
    const std::optional<Bends> bends = bends_of_up(a);
    if (!bends || bends->value == 0) {
      const double limit = exact_activations::limit_of(a);
      return with_step({slope, 0}, z.value < 0 ? -limit : limit, z);
    }
    const Bounded smooth = mapped(slope, bends->value, bends->slope, z);
    return with_cancellation(smooth, *bends, 1 + std::abs(z.value));
  }
};

Matrix<double> map(const Matrix<Bounded>& m, double (*f)(const Bounded&)) {
  Matrix<double> result(m.rows, m.cols);
  std::ranges::transform(m.values, result.values.begin(), f);
  return result;
}

double value(const Bounded& v) { return v.value; }
double magnitude(const Bounded& v) { return std::abs(v.value); }
double value_squared(const Bounded& v) { return squared(v.value); }
double error_squared(const Bounded& v) { return v.square; }

void add_product(const Matrix<double>& a, const Matrix<double>& b, Matrix<Bounded>& squares) {
  const Matrix<double> sums = product(a, b);
  for (std::size_t i = 0; i < sums.values.size(); ++i) squares.values[i].square += sums.values[i];
}

}  // namespace

Bounded& Bounded::operator+=(const Bounded& other) {
  *this = in_fp32({value + other.value, square + other.square});
  return *this;
}

Bounded operator*(const Bounded& a, const Bounded& b) {
  const double square =
      squared(a.value) * b.square + squared(b.value) * a.square + a.square * b.square;
  return in_fp32({a.value * b.value, square});
}

Bounded operator/(const Bounded& a, const Bounded& b) {
  return in_fp32({a.value / b.value, a.square / squared(b.value)});
}

Bounded rounded_to_bf16(const Bounded& v) { return {v.value, v.square + rounding(v, kBf16Unit)}; }

template <>
Matrix<Bounded> product(const Matrix<Bounded>& a, const Matrix<Bounded>& b) {
  Matrix<Bounded> sums(a.rows, b.cols);
  const Matrix<double> values = product(map(a, value), map(b, value));
  const Matrix<double> magnitudes = product(map(a, magnitude), map(b, magnitude));
  for (std::size_t i = 0; i < sums.values.size(); ++i) {
    // Each step rounds a partial sum, none of which is larger than the sum of magnitudes.
    const double steps = static_cast<double>(a.cols) * squared(kFp32Unit * magnitudes.values[i]);
    sums.values[i] = {values.values[i], steps};
  }
  add_product(map(a, value_squared), map(b, error_squared), sums);
  add_product(map(a, error_squared), map(b, value_squared), sums);
  add_product(map(a, error_squared), map(b, error_squared), sums);
  return sums;
}

Outputs<Bounded> bounded(const LayerData& layer, bool backward,
                         const std::function<void()>& expert_done) {
  Inputs<Bounded> inputs = widen<Bounded>(layer);
  if (!backward) inputs.dy.clear();
  return run_layer<BoundedArithmetic>(inputs, expert_done);
}

}  // namespace uniep::reference
