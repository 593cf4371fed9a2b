#include "uniep/bf16.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>

#include "support/cases.h"

namespace uniep::testing {
namespace {

bool is_nan(bf16 v) { return std::isnan(to_float(v)); }

/// Rounding to nearest, ties to even, said in double: of the two neighbours the nearer one, and of
/// two equally near the one with an even last bit. What is not nearer to the largest number than to
/// 2^128 is infinite.
bf16 nearest_bf16(float v) {
  const auto magnitude_bits = [](int bits) {
    return bits == 0x7f80 ? std::ldexp(1.0, 128)  // as if the exponent range went on
                          : static_cast<double>(to_float({static_cast<std::uint16_t>(bits)}));
  };
  const double magnitude = std::abs(static_cast<double>(v));
  int low = 0;  // the largest that is not above
  for (int step = 0x4000; step > 0; step /= 2) {
    if (low + step <= 0x7f80 && magnitude_bits(low + step) <= magnitude) low += step;
  }
  int result = low;
  if (low < 0x7f80) {
    const double below = magnitude - magnitude_bits(low);
    const double above = magnitude_bits(low + 1) - magnitude;
    if (above < below || (above == below && low % 2 == 1)) result = low + 1;
  }
  return {static_cast<std::uint16_t>(result | (std::signbit(v) ? 0x8000 : 0))};
}

TEST(Bf16, EveryPatternSurvivesTheRoundTrip) {
  for (unsigned bits = 0; bits < 0x10000; ++bits) {
    const bf16 v{static_cast<std::uint16_t>(bits)};
    const bf16 back = to_bf16(to_float(v));
    if (is_nan(v)) {
      EXPECT_EQ(back.bits, bits | 0x0040u) << "a NaN becomes quiet and keeps the rest";
    } else {
      EXPECT_EQ(back.bits, bits);
    }
  }
}

TEST(Bf16, RoundsToNearestEvenAroundEveryPattern) {
  for (unsigned bits = 0; bits < 0x10000; ++bits) {
    if ((bits & 0x7f80u) == 0x7f80u) continue;  // infinities and NaNs
    for (const unsigned rest : {1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      const auto v = std::bit_cast<float>((bits << 16) | rest);
      ASSERT_EQ(to_bf16(v).bits, nearest_bf16(v).bits) << std::hex << bits << " " << rest;
    }
  }
}

TEST(Bf16, RoundsRandomNumbersAsTheDefinitionSays) {
  std::mt19937 rng(1);
  for (int i = 0; i < cases(300000); ++i) {
    const auto v = std::bit_cast<float>(static_cast<std::uint32_t>(rng()));
    if (std::isnan(v)) continue;
    ASSERT_EQ(to_bf16(v).bits, nearest_bf16(v).bits) << v;
  }
}

TEST(Bf16, OverflowsToInfinityFromHalfAStepAboveTheLargest) {
  const float largest = to_float({0x7f7f});
  const auto half_step_above = std::bit_cast<float>(0x7f7f8000u);
  EXPECT_EQ(to_bf16(largest).bits, 0x7f7f);
  EXPECT_EQ(to_bf16(std::nextafter(half_step_above, 0.0f)).bits, 0x7f7f);
  EXPECT_EQ(to_bf16(half_step_above).bits, 0x7f80) << "the tie goes to the even one, 2^128";
  EXPECT_EQ(to_bf16(std::numeric_limits<float>::max()).bits, 0x7f80);
  EXPECT_EQ(to_bf16(-std::numeric_limits<float>::max()).bits, 0xff80);
  EXPECT_EQ(to_bf16(std::numeric_limits<float>::infinity()).bits, 0x7f80);
}

TEST(Bf16, NoNanBecomesAnInfinity) {
  for (const std::uint32_t bits : {0x7f800001u, 0x7f80ffffu, 0x7fffffffu, 0xff800001u, 0xffffffffu,
                                   0x7fc00000u, 0xffc00000u}) {
    const bf16 v = to_bf16(std::bit_cast<float>(bits));
    EXPECT_TRUE(is_nan(v)) << std::hex << bits;
    EXPECT_EQ(v.bits >> 15, bits >> 31) << "the sign stays";
  }
}

TEST(Bf16, ComparesBits) {
  EXPECT_FALSE((bf16{0x0000} == bf16{0x8000}));
  EXPECT_TRUE((bf16{0x7fc0} == bf16{0x7fc0}));
}

}  // namespace
}  // namespace uniep::testing
