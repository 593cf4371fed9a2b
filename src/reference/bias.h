#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "reference/activation.h"
#include "reference/matrix.h"

namespace uniep::reference {

/// bf16(row + factor bias), for each row: the product was rounded before. Without a bias, the rows.
template <class Arithmetic, class T>
Matrix<T> with_bias(Matrix<T> m, const std::vector<T>& bias, const std::vector<T>& factors) {
  if (bias.empty()) return m;
  for (std::int64_t r = 0; r < m.rows; ++r) {
    for (std::int64_t c = 0; c < m.cols; ++c) {
      T sum = m.row(r)[c];
      sum += factors[static_cast<std::size_t>(r)] * bias[static_cast<std::size_t>(c)];
      m.row(r)[c] = Arithmetic::stored(sum);
    }
  }
  return m;
}

/// Expert e's part of a tensor [E, width]; empty where there are no biases.
template <class T>
std::vector<T> expert_bias(const std::vector<T>& tensor, std::int64_t e, std::int64_t width) {
  if (tensor.empty()) return {};
  return {tensor.begin() + e * width, tensor.begin() + (e + 1) * width};
}

/// The sum over an expert's rows of factor times row, in the order of docs/numerics.md, not
/// rounded.
template <class T>
Matrix<T> bias_grad(const Matrix<T>& rows, const std::vector<T>& factors) {
  Matrix<T> sum(1, rows.cols);
  for (std::int64_t c = 0; c < rows.cols; ++c) {
    for (std::int64_t first = 0; first < rows.rows; first += 64) {
      T partials[4] = {};
      const std::int64_t end = std::min<std::int64_t>(first + 64, rows.rows);
      for (std::int64_t r = first; r < end; ++r) {
        partials[r % 8 / 2] += factors[static_cast<std::size_t>(r)] * rows.row(r)[c];
      }
      partials[0] += partials[1];
      partials[2] += partials[3];
      partials[0] += partials[2];
      sum.values[static_cast<std::size_t>(c)] += partials[0];
    }
  }
  return sum;
}

/// Adds the part of b2 to dp: the sum over the columns of dy b2.
template <class T>
void add_bias_dprobs(const Matrix<T>& dy, const std::vector<T>& b2, std::vector<T>& dprobs) {
  if (b2.empty()) return;
  std::vector<T> terms(b2.size());
  for (std::int64_t r = 0; r < dy.rows; ++r) {
    for (std::size_t c = 0; c < b2.size(); ++c) terms[c] = dy.row(r)[c] * b2[c];
    dprobs[static_cast<std::size_t>(r)] += sum_dprob_terms(terms);
  }
}

}  // namespace uniep::reference
