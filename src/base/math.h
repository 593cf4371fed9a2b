#pragma once

#include "uniep/macros.h"

namespace uniep {

template <class T>
constexpr UNIEP_HD T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}

template <class T>
constexpr UNIEP_HD T round_up(T a, T b) {
  return ceil_div(a, b) * b;
}

template <class T>
constexpr UNIEP_HD T min_of(T a, T b) {
  return b < a ? b : a;
}

template <class T>
constexpr UNIEP_HD T max_of(T a, T b) {
  return a < b ? b : a;
}

template <class T>
constexpr UNIEP_HD T clamp_to(T v, T lo, T hi) {
  return max_of(lo, min_of(v, hi));
}

}  // namespace uniep
