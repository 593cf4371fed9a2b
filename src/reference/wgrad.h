#pragma once

#include <algorithm>
#include <vector>

#include "reference/matrix.h"

namespace uniep::reference {

/// One expert's weight gradient, summed over its rows in canonical order and not rounded:
/// dw2[e] = dy^T a and dw1[e] = dh^T x.
template <class T>
Matrix<T> wgrad(const Matrix<T>& output_grad, const Matrix<T>& input) {
  return product(transposed(output_grad), input);
}

/// Writes expert e's gradient to its place in a tensor [E, rows, cols].
template <class T>
void place_wgrad(const Matrix<T>& gradient, std::int64_t e, std::vector<T>& tensor) {
  std::copy(gradient.values.begin(), gradient.values.end(),
            tensor.begin() + e * gradient.rows * gradient.cols);
}

}  // namespace uniep::reference
