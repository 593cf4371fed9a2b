#include "reference/matrix.h"

#include "base/check.h"

// The oracle's products run in one thread, and are most of what ThreadSanitizer would look at.
#ifdef __clang__
#define UNIEP_IN_ONE_THREAD clang::no_sanitize("thread")
#else
#define UNIEP_IN_ONE_THREAD gnu::no_sanitize("thread")
#endif

namespace uniep::reference {
namespace {

/// std::fma, which GCC does not inline into what no sanitizer looks at.
[[gnu::always_inline, UNIEP_IN_ONE_THREAD]] inline float fused(float a, float b, float c) {
  return __builtin_fmaf(a, b, c);
}
[[gnu::always_inline, UNIEP_IN_ONE_THREAD]] inline double fused(double a, double b, double c) {
  return __builtin_fma(a, b, c);
}

// k outside n: the elements of an output row advance side by side, each still in ascending k.
template <class T>
[[gnu::always_inline, UNIEP_IN_ONE_THREAD]] inline void accumulate(const Matrix<T>& a,
                                                                   const Matrix<T>& b,
                                                                   Matrix<T>& sum) {
  for (std::int64_t m = 0; m < a.rows; ++m) {
    T* acc = sum.row(m);
    for (std::int64_t k = 0; k < a.cols; ++k) {
      const T factor = a.row(m)[k];
      const T* b_row = b.row(k);
      for (std::int64_t n = 0; n < b.cols; ++n) acc[n] = fused(factor, b_row[n], acc[n]);
    }
  }
}

// A baseline x86-64 build calls libm once per std::fma. Compiled for a CPU that has the instruction
// the same loop is more than ten times faster, and IEEE 754 gives both the same bits.
#if defined(__x86_64__) && !defined(__FMA__)
template <class T>
[[gnu::target("avx2,fma"), UNIEP_IN_ONE_THREAD]] void accumulate_fma(const Matrix<T>& a,
                                                                     const Matrix<T>& b,
                                                                     Matrix<T>& sum) {
  accumulate(a, b, sum);
}

bool has_fma() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
#else
template <class T>
[[UNIEP_IN_ONE_THREAD]] void accumulate_fma(const Matrix<T>& a, const Matrix<T>& b,
                                            Matrix<T>& sum) {
  accumulate(a, b, sum);
}

bool has_fma() { return true; }
#endif

}  // namespace

template <class T>
Matrix<T> product(const Matrix<T>& a, const Matrix<T>& b) {
  ensure(a.cols == b.rows, "product of a ", a.rows, "x", a.cols, " and a ", b.rows, "x", b.cols,
         " matrix");
  Matrix<T> sum(a.rows, b.cols);
  if (has_fma()) {
    accumulate_fma(a, b, sum);
  } else {
    accumulate(a, b, sum);
  }
  return sum;
}

template Matrix<float> product(const Matrix<float>&, const Matrix<float>&);
template Matrix<double> product(const Matrix<double>&, const Matrix<double>&);

}  // namespace uniep::reference
