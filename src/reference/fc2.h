#pragma once

#include "reference/arithmetic.h"
#include "reference/matrix.h"

namespace uniep::reference {

/// y = bf16(w2[e] a), per row.
template <class Arithmetic, class T>
Matrix<T> fc2(const Matrix<T>& a, const Matrix<T>& w2) {
  return stored<Arithmetic>(product(a, transposed(w2)));
}

/// da = bf16(w2[e]^T dy), per row.
template <class Arithmetic, class T>
Matrix<T> fc2_dgrad(const Matrix<T>& dy, const Matrix<T>& w2) {
  return stored<Arithmetic>(product(dy, w2));
}

}  // namespace uniep::reference
