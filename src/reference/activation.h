#pragma once

#include <array>
#include <vector>

#include "base/contract.h"
#include "base/math.h"
#include "reference/matrix.h"

namespace uniep::reference {

/// a = bf16(p (silu(h_g) h_u)), per row. The columns of h are h_g, then h_u.
template <class Arithmetic, class T>
Matrix<T> activation(const Matrix<T>& h, const std::vector<T>& probs) {
  Matrix<T> a(h.rows, h.cols / 2);
  for (std::int64_t r = 0; r < a.rows; ++r) {
    const T p = probs[static_cast<std::size_t>(r)];
    const T* gate = h.row(r);
    const T* up = gate + a.cols;
    for (std::int64_t i = 0; i < a.cols; ++i) {
      a.row(r)[i] = Arithmetic::stored(p * (Arithmetic::silu(gate[i]) * up[i]));
    }
  }
  return a;
}

/// dh = bf16([((p da) h_u) silu'(h_g); (p da) silu(h_g)]), per row.
template <class Arithmetic, class T>
Matrix<T> activation_dgrad(const Matrix<T>& h, const std::vector<T>& probs, const Matrix<T>& da) {
  Matrix<T> dh(h.rows, h.cols);
  for (std::int64_t r = 0; r < da.rows; ++r) {
    const T p = probs[static_cast<std::size_t>(r)];
    const T* gate = h.row(r);
    const T* up = gate + da.cols;
    T* dgate = dh.row(r);
    T* dup = dgate + da.cols;
    for (std::int64_t i = 0; i < da.cols; ++i) {
      const T df = p * da.row(r)[i];
      dgate[i] = Arithmetic::stored((df * up[i]) * Arithmetic::silu_grad(gate[i]));
      dup[i] = Arithmetic::stored(df * Arithmetic::silu(gate[i]));
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

/// dp = sum over i of da (silu(h_g) h_u), one number per row, in groups of kDprobGroup columns.
template <class Arithmetic, class T>
std::vector<T> dprobs(const Matrix<T>& h, const Matrix<T>& da) {
  std::vector<T> sums(static_cast<std::size_t>(h.rows));
  std::vector<T> terms(static_cast<std::size_t>(da.cols));
  for (std::int64_t r = 0; r < da.rows; ++r) {
    const T* gate = h.row(r);
    const T* up = gate + da.cols;
    for (std::int64_t i = 0; i < da.cols; ++i) {
      terms[static_cast<std::size_t>(i)] = da.row(r)[i] * (Arithmetic::silu(gate[i]) * up[i]);
    }
    for (std::int64_t i = 0; i < da.cols; i += kDprobGroup) {
      sums[static_cast<std::size_t>(r)] +=
          sum_dprob_group(terms.data() + i, min_of(kDprobGroup, da.cols - i));
    }
  }
  return sums;
}

}  // namespace uniep::reference
