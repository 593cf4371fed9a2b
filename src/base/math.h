#pragma once

#include <bit>
#include <cstdint>

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

/// The exponent of a power of two: what to shift by instead of dividing by it.
constexpr UNIEP_HD int log2_of(std::uint32_t power) {
#ifdef __CUDA_ARCH__
  return 31 - __clz(static_cast<int>(power));
#else
  return std::countr_zero(power);
#endif
}

/// floor((a b + c) / d), for quotients below 2^32 and d below 2^31. The same on a GPU, where a
/// division of 64 bits would take more registers than kernels have to spare.
inline UNIEP_HD std::uint32_t mul_div(std::uint32_t a, std::uint32_t b, std::uint32_t d,
                                      std::uint32_t c = 0) {
  const std::uint64_t dividend = std::uint64_t{a} * b + c;
#ifdef __CUDA_ARCH__
  auto quotient = static_cast<std::uint32_t>(__fdividef(static_cast<float>(dividend), d));
  // What an estimate of 22 bits leaves, of either sign.
  auto rest = static_cast<std::int64_t>(dividend - std::uint64_t{quotient} * d);
#pragma unroll 1
  for (; rest < 0; rest += d) --quotient;
#pragma unroll 1
  for (; rest >= d; rest -= d) ++quotient;
  return quotient;
#else
  return static_cast<std::uint32_t>(dividend / d);
#endif
}

}  // namespace uniep
