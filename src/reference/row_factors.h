#pragma once

#include <cstddef>
#include <vector>

#include "reference/arithmetic.h"
#include "reference/matrix.h"
#include "uniep/problem.h"

namespace uniep::reference {

// The probabilities of an expert's rows enter a with Probs::kBefore, and dh through it. With
// Probs::kAfter they enter the sum over a token's rows, and so the rows of dy that backward begins
// with, bf16(p dy). Then dprobs, the sum of dy times the row behind fc2, is the sum of da f divided
// by p, since da comes from p dy. A row whose p is 0 is dispatched as dy itself, so that this sum
// is right without the division; its a and dh are zeros, as p dy would have made them.

template <class T>
bool is_zero(const T& v) {
  return v == T{};
}

template <class T>
struct RowFactors {
  std::vector<T> forward;   ///< of a
  std::vector<T> backward;  ///< of a and da
  std::vector<T> of_dy;
  std::vector<T> of_b2;    ///< what b2 is multiplied by, forward
  std::vector<T> of_db2;   ///< what rows of dy are multiplied by in db2
  std::vector<T> divisor;  ///< of dprobs
};

template <class T>
RowFactors<T> row_factors(const std::vector<T>& probs, Probs place) {
  const T one{1};
  const std::vector<T> ones(probs.size(), one);
  if (place == Probs::kBefore) return {probs, probs, ones, probs, probs, ones};
  RowFactors<T> factors{ones, {}, {}, ones, {}, {}};
  for (const T& p : probs) {
    factors.backward.push_back(is_zero(p) ? T{} : one);
    factors.of_dy.push_back(is_zero(p) ? one : p);
    factors.divisor.push_back(factors.of_dy.back());
  }
  factors.of_db2 = factors.backward;
  return factors;
}

template <class T>
void divide(std::vector<T>& values, const std::vector<T>& divisors) {
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = values[i] / divisors[i];
}

/// bf16(factor row), for each row.
template <class Arithmetic, class T>
Matrix<T> scaled_rows(Matrix<T> m, const std::vector<T>& factors) {
  for (std::int64_t r = 0; r < m.rows; ++r) {
    for (std::int64_t c = 0; c < m.cols; ++c) {
      m.row(r)[c] = Arithmetic::stored(factors[static_cast<std::size_t>(r)] * m.row(r)[c]);
    }
  }
  return m;
}

}  // namespace uniep::reference
