#pragma once

#include <cstdint>
#include <vector>

namespace uniep::reference {

/// A dense row-major matrix of zeros, to begin with.
template <class T>
struct Matrix {
  Matrix(std::int64_t num_rows, std::int64_t num_cols)
      : rows(num_rows), cols(num_cols), values(static_cast<std::size_t>(num_rows * num_cols)) {}

  T* row(std::int64_t r) { return values.data() + r * cols; }
  const T* row(std::int64_t r) const { return values.data() + r * cols; }

  std::int64_t rows;
  std::int64_t cols;
  std::vector<T> values;
};

template <class T>
Matrix<T> transposed(const Matrix<T>& m) {
  Matrix<T> t(m.cols, m.rows);
  for (std::int64_t r = 0; r < m.rows; ++r) {
    for (std::int64_t c = 0; c < m.cols; ++c) t.row(c)[r] = m.row(r)[c];
  }
  return t;
}

/// a [M, K] times b [K, N]. Every element has one accumulator, which starts from +0 and takes one
/// fused multiply-add per step, k ascending: the GEMM of the numerics contract when T is float.
/// For T = float and double; bounded.h's numbers have their own.
template <class T>
Matrix<T> product(const Matrix<T>& a, const Matrix<T>& b);

}  // namespace uniep::reference
