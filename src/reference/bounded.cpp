#include "reference/bounded.h"

#include <algorithm>
#include <cmath>

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

struct BoundedArithmetic {
  using Number = Bounded;

  static Bounded stored(const Bounded& v) { return rounded_to_bf16(v); }
  static Bounded silu(const Bounded& z) {
    return mapped(ExactArithmetic::silu(z.value), ExactArithmetic::silu_grad(z.value), 0.5, z);
  }
  static Bounded silu_grad(const Bounded& z) {
    // silu'' lies between -0.1 and 0.5, and silu''' between -0.31 and 0.31.
    return mapped(ExactArithmetic::silu_grad(z.value), 0.5, 0.31, z);
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
