#include "workload/random.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cfloat>
#include <cmath>
#include <thread>
#include <vector>

namespace uniep::workload {
namespace {

static_assert(FLT_EVAL_METHOD == 0, "results must not depend on extra precision of registers");

constexpr std::uint64_t kGolden = 0x9e3779b97f4a7c15u;
constexpr double kLn2 = 0x1.62e42fefa39efp-1;
constexpr double kPi = 0x1.921fb54442d18p+1;
constexpr int kMantissaBits = 52;

// atanh(s) / s in powers of s squared, highest first.
constexpr std::array kAtanh = {1. / 19, 1. / 17, 1. / 15, 1. / 13, 1. / 11,
                               1. / 9,  1. / 7,  1. / 5,  1. / 3,  1.};

/// The finaliser of SplitMix64 (Steele, Lea, Flood 2014).
std::uint64_t mix(std::uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

struct Angle {
  double cos;
  double sin;
};

/// cos and sin of 2 pi turns, turns in [0, 1).
Angle on_circle(double turns) {
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

constexpr std::size_t kBlock = 4096;         // values drawn at once, even
constexpr std::size_t kPerThread = 1 << 20;  // fewer values are not worth a thread
constexpr std::size_t kMaxThreads = 16;      // more are limited by memory

}  // namespace

double portable_log(double x) {
  auto bits = std::bit_cast<std::uint64_t>(x);
  // m in [sqrt(1/2), sqrt(2)), so that s below is small on both sides.
  constexpr std::uint64_t kSqrtHalf = 0x3fe6a09e667f3bcdu;
  const auto exponent = static_cast<std::int64_t>(bits - kSqrtHalf) >> kMantissaBits;
  bits -= static_cast<std::uint64_t>(exponent) << kMantissaBits;
  const double m = std::bit_cast<double>(bits);
  const double s = (m - 1) / (m + 1);
  const double q = s * s;
  double series = 0;
  for (const double factor : kAtanh) series = factor + q * series;
  return static_cast<double>(exponent) * kLn2 + 2 * s * series;
}

double portable_exp(double x) {
  if (x < -700) return 0;  // and nothing below needs subnormal numbers
  const int power = static_cast<int>(x / kLn2 - 0.5);
  const double r = x - power * kLn2;  // -0.35 to 0.35
  double series = 1;
  for (int n = 13; n >= 1; --n) series = 1 + r / n * series;
  const auto scale = static_cast<std::uint64_t>(1023 + power) << kMantissaBits;
  return series * std::bit_cast<double>(scale);
}

NormalStream::NormalStream(std::uint64_t seed, std::uint64_t stream)
    : key_(mix(mix(seed + kGolden) + (stream + 1) * kGolden)) {}

void NormalStream::fill(std::uint64_t first, std::span<double> out) const {
  // Box and Muller: two values of one hash, whose upper half is the radius, the lower the angle.
  constexpr double kUnit = 0x1p-32;
  for (std::size_t i = 0; i < out.size(); i += 2) {
    const std::uint64_t bits = mix(key_ + ((first + i) / 2 + 1) * kGolden);
    const double u = (static_cast<double>(bits >> 32) + 0.5) * kUnit;
    const double radius = std::sqrt(-2 * portable_log(u));
    const Angle angle = on_circle(static_cast<double>(bits & 0xffffffffu) * kUnit);
    out[i] = radius * angle.cos;
    if (i + 1 < out.size()) out[i + 1] = radius * angle.sin;
  }
}

void NormalStream::fill(std::span<bf16> out, double scale) const {
  const auto fill_range = [&](std::size_t begin, std::size_t end) {
    std::array<double, kBlock> block;
    for (std::size_t i = begin; i < end; i += kBlock) {
      const std::size_t n = std::min(kBlock, end - i);
      fill(i, std::span(block).first(n));
      for (std::size_t j = 0; j < n; ++j) {
        out[i + j] = to_bf16(static_cast<float>(scale * block[j]));
      }
    }
  };
  const std::size_t cores = std::max(1u, std::thread::hardware_concurrency());
  const std::size_t threads =
      std::clamp<std::size_t>(out.size() / kPerThread, 1, std::min(cores, kMaxThreads));
  // Ranges start at even indices, as a pair of values comes from one hash.
  const std::size_t step = (out.size() / threads / 2 + 1) * 2;
  std::vector<std::jthread> others;
  for (std::size_t t = 1; t < threads; ++t) {
    others.emplace_back(fill_range, t * step, std::min(out.size(), (t + 1) * step));
  }
  fill_range(0, std::min(out.size(), step));
}

}  // namespace uniep::workload
