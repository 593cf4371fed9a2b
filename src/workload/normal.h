#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "base/mixed_bits.h"
#include "uniep/macros.h"

// The arithmetic behind NormalStream, from IEEE operations alone: every C library, and a GPU whose
// code is compiled with -fmad=false, gives the same bits.

namespace uniep::workload {

inline constexpr std::uint64_t kGolden = 0x9e3779b97f4a7c15u;
inline constexpr int kMantissaBits = 52;
inline constexpr double kLn2 = 0x1.62e42fefa39efp-1;
inline constexpr double kPi = 0x1.921fb54442d18p+1;

/// log(x) for normal x > 0. Relative error below 1e-13.
UNIEP_HD inline double portable_log(double x) {
  auto bits = std::bit_cast<std::uint64_t>(x);
  // m in [sqrt(1/2), sqrt(2)), so that s below is small on both sides.
  constexpr std::uint64_t kSqrtHalf = 0x3fe6a09e667f3bcdu;
  const auto exponent = static_cast<std::int64_t>(bits - kSqrtHalf) >> kMantissaBits;
  bits -= static_cast<std::uint64_t>(exponent) << kMantissaBits;
  const double m = std::bit_cast<double>(bits);
  const double s = (m - 1) / (m + 1);
  const double q = s * s;
  // atanh(s) / s in powers of s squared, highest first.
  constexpr double kAtanh[] = {1. / 19, 1. / 17, 1. / 15, 1. / 13, 1. / 11,
                               1. / 9,  1. / 7,  1. / 5,  1. / 3,  1.};
  double series = 0;
  for (const double factor : kAtanh) series = factor + q * series;
  return static_cast<double>(exponent) * kLn2 + 2 * s * series;
}

struct Angle {
  double cos;
  double sin;
};

/// cos and sin of 2 pi turns, turns in [0, 1).
UNIEP_HD inline Angle on_circle(double turns) {
  const int quadrant = static_cast<int>(4 * turns + 0.5);
  const double a = (turns - 0.25 * quadrant) * (2 * kPi);  // -pi/4 to pi/4
  const double q = a * a;
  // Taylor series; the first term left out is below 1e-15.
  const double s =
      a * (1 + q * (-1. / 6 +
                    q * (1. / 120 +
                         q * (-1. / 5040 +
                              q * (1. / 362880 + q * (-1. / 39916800 + q * (1. / 6227020800)))))));
  const double c =
      1 + q * (-1. / 2 +
               q * (1. / 24 +
                    q * (-1. / 720 +
                         q * (1. / 40320 + q * (-1. / 3628800 +
                                                q * (1. / 479001600 + q * (-1. / 87178291200)))))));
  switch (quadrant & 3) {
    case 0:
      return {c, s};
    case 1:
      return {-s, c};
    case 2:
      return {-c, -s};
    default:
      return {s, -c};
  }
}

/// Values 2 * pair and 2 * pair + 1 of the stream with this key.
struct NormalPair {
  double even;
  double odd;
};
UNIEP_HD inline NormalPair normal_pair(std::uint64_t key, std::uint64_t pair) {
  // Box and Muller: two values of one hash, whose upper half is the radius, the lower the angle.
  constexpr double kUnit = 0x1p-32;
  const std::uint64_t bits = mixed_bits(key + (pair + 1) * kGolden);
  const double u = (static_cast<double>(bits >> 32) + 0.5) * kUnit;
  const double radius = std::sqrt(-2 * portable_log(u));
  const Angle angle = on_circle(static_cast<double>(bits & 0xffffffffu) * kUnit);
  return {radius * angle.cos, radius * angle.sin};
}

}  // namespace uniep::workload
