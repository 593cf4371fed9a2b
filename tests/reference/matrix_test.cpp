#include "reference/matrix.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "reference/compare.h"

namespace uniep::reference {
namespace {

// Of all magnitudes, so that products and sums also round, underflow and cancel.
template <class T>
Matrix<T> wild_matrix(std::int64_t rows, std::int64_t cols, unsigned seed) {
  std::mt19937 bits(seed);
  Matrix<T> m(rows, cols);
  for (T& v : m.values) {
    const T mantissa = static_cast<T>(bits()) - static_cast<T>(bits());
    v = std::ldexp(mantissa, -static_cast<int>(bits() % 100) - 32);
  }
  return m;
}

template <class T>
void expect_ascending_fma() {
  const auto a = wild_matrix<T>(5, 37, 1);
  const auto b = wild_matrix<T>(37, 19, 2);
  Matrix<T> want(5, 19);
  for (std::int64_t m = 0; m < want.rows; ++m) {
    for (std::int64_t n = 0; n < want.cols; ++n) {
      T acc = 0;
      for (std::int64_t k = 0; k < a.cols; ++k) acc = std::fma(a.row(m)[k], b.row(k)[n], acc);
      want.row(m)[n] = acc;
    }
  }
  EXPECT_EQ(first_difference(product(a, b).values, want.values).count, 0);
}

TEST(Product, IsOneFusedMultiplyAddPerStepInAscendingOrder) {
  expect_ascending_fma<float>();
  expect_ascending_fma<double>();
}

TEST(Product, OfNothingIsPositiveZero) {
  const auto sum = product(Matrix<float>(2, 0), Matrix<float>(0, 3));
  EXPECT_EQ(first_difference(sum.values, std::vector<float>(6, +0.0f)).count, 0);
}

TEST(Transposed, SwapsRowsAndColumns) {
  Matrix<double> m(2, 3);
  m.values = {1, 2, 3, 4, 5, 6};
  const auto t = transposed(m);
  EXPECT_EQ(t.rows, 3);
  EXPECT_EQ(t.values, (std::vector<double>{1, 4, 2, 5, 3, 6}));
}

}  // namespace
}  // namespace uniep::reference
