#pragma once

#include "reference/arithmetic.h"
#include "reference/matrix.h"

namespace uniep::reference {

/// h = bf16(w1[e] x), per row.
template <class Arithmetic, class T>
Matrix<T> fc1(const Matrix<T>& x, const Matrix<T>& w1) {
  return stored<Arithmetic>(product(x, transposed(w1)));
}

/// dx = bf16(w1[e]^T dh), per row.
template <class Arithmetic, class T>
Matrix<T> fc1_dgrad(const Matrix<T>& dh, const Matrix<T>& w1) {
  return stored<Arithmetic>(product(dh, w1));
}

}  // namespace uniep::reference
