#pragma once

#include <array>
#include <vector>

#include "base/contract.h"
#include "base/math.h"
#include "reference/matrix.h"
#include "uniep/problem.h"

namespace uniep::reference {

/// Columns of a: those of one half of h.
template <class T>
std::int64_t columns_of_a(const Matrix<T>& h, Activation activation) {
  return is_gated(activation) ? h.cols / 2 : h.cols;
}

/// f = value(h_g) value(h_u), or value(h) without a gate, of row r and column i.
template <class Arithmetic, class T>
T activated(const Matrix<T>& h, Activation activation, std::int64_t r, std::int64_t i) {
  const T gate = Arithmetic::gate(activation, h.row(r)[i]);
  if (!is_gated(activation)) return gate;
  return gate * Arithmetic::up(activation, h.row(r)[columns_of_a(h, activation) + i]);
}

/// a = bf16(p f), per row. The columns of h are h_g, then h_u.
template <class Arithmetic, class T>
Matrix<T> activation(const Matrix<T>& h, const std::vector<T>& probs,
                     Activation activation = Activation::kSwiglu) {
  Matrix<T> a(h.rows, columns_of_a(h, activation));
  for (std::int64_t r = 0; r < a.rows; ++r) {
    const T p = probs[static_cast<std::size_t>(r)];
    for (std::int64_t i = 0; i < a.cols; ++i) {
      a.row(r)[i] = Arithmetic::stored(p * activated<Arithmetic>(h, activation, r, i));
    }
  }
  return a;
}

/// dh = bf16([((p da) value(h_u)) slope(h_g); ((p da) value(h_g)) slope(h_u)]), per row; without a
/// gate bf16((p da) slope(h)).
template <class Arithmetic, class T>
Matrix<T> activation_dgrad(const Matrix<T>& h, const std::vector<T>& probs, const Matrix<T>& da,
                           Activation activation = Activation::kSwiglu) {
  Matrix<T> dh(h.rows, h.cols);
  for (std::int64_t r = 0; r < da.rows; ++r) {
    const T p = probs[static_cast<std::size_t>(r)];
    const T* gate = h.row(r);
    const T* up = gate + da.cols;
    T* dgate = dh.row(r);
    T* dup = dgate + da.cols;
    for (std::int64_t i = 0; i < da.cols; ++i) {
      const T df = p * da.row(r)[i];
      const T slope = Arithmetic::gate_slope(activation, gate[i]);
      if (!is_gated(activation)) {
        dgate[i] = Arithmetic::stored(df * slope);
        continue;
      }
      dgate[i] = Arithmetic::stored((df * Arithmetic::up(activation, up[i])) * slope);
      dup[i] = Arithmetic::stored((df * Arithmetic::gate(activation, gate[i])) *
                                  Arithmetic::up_slope(activation, up[i]));
    }
  }
  return dh;
}

/// The sum over one group's columns in the order of base/contract.h; every lane starts from +0.
template <class T>
T sum_dprob_group(const T* terms, std::int64_t columns) {
  std::array<T, kDprobLanes> lanes{};
  for (std::int64_t c = 0; c < columns; ++c) {
    lanes[static_cast<std::size_t>(c % kDprobLanes)] += terms[c];
  }
  for (std::size_t half = kDprobLanes / 2; half > 0; half /= 2) {
    for (std::size_t l = 0; l < half; ++l) lanes[l] += lanes[l + half];
  }
  return lanes[0];
}

/// Sums a row's terms in groups of kDprobGroup columns, then over the groups ascending.
template <class T>
T sum_dprob_terms(const std::vector<T>& terms) {
  T sum{};
  const auto columns = static_cast<std::int64_t>(terms.size());
  for (std::int64_t i = 0; i < columns; i += kDprobGroup) {
    sum += sum_dprob_group(terms.data() + i, min_of(kDprobGroup, columns - i));
  }
  return sum;
}

/// dp = sum over i of da f, one number per row.
template <class Arithmetic, class T>
std::vector<T> dprobs(const Matrix<T>& h, const Matrix<T>& da,
                      Activation activation = Activation::kSwiglu) {
  std::vector<T> sums;
  std::vector<T> terms(static_cast<std::size_t>(da.cols));
  for (std::int64_t r = 0; r < da.rows; ++r) {
    for (std::int64_t i = 0; i < da.cols; ++i) {
      terms[static_cast<std::size_t>(i)] =
          da.row(r)[i] * activated<Arithmetic>(h, activation, r, i);
    }
    sums.push_back(sum_dprob_terms(terms));
  }
  return sums;
}

}  // namespace uniep::reference
