#include "base/activation_math.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace uniep {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

/// |got - want| in units of the last place that fp32 has at `want`.
double ulps(float got, double want) {
  int exponent = 0;
  std::frexp(want, &exponent);
  return std::fabs(static_cast<double>(got) - want) /
         std::ldexp(1.0, std::max(exponent - 24, -149));
}

/// Calls f(x) for about 2 million floats of all signs and magnitudes, NaN and inf left out.
template <class F>
void for_many_floats(F f) {
  for (std::uint64_t bits = 0; bits <= 0xffffffffu; bits += 2039) {
    const float x = std::bit_cast<float>(static_cast<std::uint32_t>(bits));
    if (std::isfinite(x)) f(x);
  }
}

TEST(ActivationMath, ExpIsNearlyCorrectlyRounded) {
  double worst = 0;
  float at = 0;
  const auto check = [&](float x) {
    const double want = std::exp(static_cast<double>(x));
    const float got = exp_f32(x);
    if (want > 3.4028235e38) {
      ASSERT_EQ(got, kInf) << x;
    } else if (ulps(got, want) > worst) {
      worst = ulps(got, want);
      at = x;
    }
  };
  for_many_floats(check);
  for (float x = -105.0f; x < 89.0f; x += 1.0f / 4096) check(x);
  EXPECT_LE(worst, 0.51) << "at " << at;
}

TEST(ActivationMath, ExpOfExtremes) {
  EXPECT_EQ(exp_f32(0.0f), 1.0f);
  EXPECT_EQ(exp_f32(-0.0f), 1.0f);
  EXPECT_EQ(exp_f32(kInf), kInf);
  EXPECT_EQ(std::bit_cast<std::uint32_t>(exp_f32(-kInf)), 0u);
  EXPECT_TRUE(std::isnan(exp_f32(kNan)));
  EXPECT_TRUE(std::isnan(exp_f32(-kNan)));
  EXPECT_EQ(exp_f32(std::numeric_limits<float>::max()), kInf);
  EXPECT_EQ(exp_f32(-std::numeric_limits<float>::max()), 0.0f);
  EXPECT_TRUE(std::isfinite(exp_f32(88.72283f)));  // the last finite one
  EXPECT_EQ(exp_f32(88.72284f), kInf);
  EXPECT_GT(exp_f32(-103.9f), 0.0f);  // subnormal
  EXPECT_EQ(exp_f32(-104.0f), 0.0f);
}

/// A half of the last place of a number below 1, which the rounding to fp32 costs.
constexpr double kRounding = 0x1p-25;

TEST(ActivationMath, TanhAndErfAreAsCloseAsTheySay) {
  double worst_tanh = 0, worst_erf = 0;
  const auto check = [&](float x) {
    worst_tanh = std::max(worst_tanh, std::fabs(tanh_f32(x) - std::tanh(static_cast<double>(x))));
    worst_erf = std::max(worst_erf, std::fabs(erf_f32(x) - std::erf(static_cast<double>(x))));
  };
  for_many_floats(check);
  for (float x = -12.0f; x < 12.0f; x += 1.0f / 4096) check(x);
  EXPECT_LE(worst_tanh, kRounding + 1e-10);
  EXPECT_LE(worst_erf, kRounding + 1e-9);
}

TEST(ActivationMath, TanhIsAsCloseToSmallNumbers) {
  double worst = 0;
  float at = 0;
  const auto check = [&](float x) {
    if (std::fabs(x) > 1.0f || std::fabs(x) < 1e-37f) return;
    const double exact = std::tanh(static_cast<double>(x));
    const double error = std::fabs(tanh_f32(x) / exact - 1);
    if (error > worst) worst = error, at = x;
  };
  for_many_floats(check);
  for (float x = -0.125f; x < 0.125f; x += 0x1p-18f) check(x);
  EXPECT_LE(worst, 0x1p-24 + 2e-9) << "at " << at;
  for (const float x : {0.0f, 1e-42f}) {
    EXPECT_EQ(tanh_f32(x), x);
    EXPECT_EQ(tanh_f32(-x), -x);
    EXPECT_TRUE(std::signbit(tanh_f32(-x)));
  }
}

TEST(ActivationMath, TanhAndErfOfExtremes) {
  for (float (*f)(float) :
       {+[](float x) { return tanh_f32(x); }, +[](float x) { return erf_f32(x); }}) {
    EXPECT_EQ(f(kInf), 1.0f);
    EXPECT_EQ(f(-kInf), -1.0f);
    EXPECT_EQ(f(20.0f), 1.0f);
    EXPECT_EQ(f(-20.0f), -1.0f);
    EXPECT_TRUE(std::isnan(f(kNan)));
  }
}

TEST(ActivationMath, SigmoidAndSiluAreAccurate) {
  double worst_s = 0, worst_silu = 0;
  float at_s = 0, at_silu = 0;
  for_many_floats([&](float z) {
    if (z < -88.0f) return;  // fp32 exp overflows: the definition gives 0, see the next test
    const double s = 1 / (1 + std::exp(-static_cast<double>(z)));
    const double error = ulps(sigmoid(z), s), silu_error = ulps(silu(z), z * s);
    if (error > worst_s) worst_s = error, at_s = z;
    if (silu_error > worst_silu) worst_silu = silu_error, at_silu = z;
  });
  EXPECT_LE(worst_s, 2.0) << "at " << at_s;
  EXPECT_LE(worst_silu, 2.5) << "at " << at_silu;
}

/// silu' crosses 0 at z = -1.278, so its error is absolute there.
TEST(ActivationMath, SiluGradIsAccurate) {
  double worst = 0;
  float at = 0;
  for_many_floats([&](float z) {
    if (z < -88.0f || z > 1e6f) return;
    const double s = 1 / (1 + std::exp(-static_cast<double>(z)));
    const double want = s * (1 + z * (1 - s));
    const double error = std::fabs(static_cast<double>(silu_grad(z)) - want);
    const double relative = error / std::max(std::fabs(want), s);
    if (relative > worst) worst = relative, at = z;
  });
  EXPECT_LE(worst, 1e-6) << "at " << at;
}

TEST(ActivationMath, SiluOfExtremes) {
  EXPECT_EQ(silu(0.0f), 0.0f);
  EXPECT_EQ(silu_grad(0.0f), 0.5f);
  EXPECT_EQ(silu(1000.0f), 1000.0f);
  EXPECT_EQ(silu_grad(1000.0f), 1.0f);
  EXPECT_EQ(std::bit_cast<std::uint32_t>(silu(-1000.0f)), 0x80000000u);
  EXPECT_EQ(silu_grad(-1000.0f), 0.0f);
  EXPECT_EQ(silu(kInf), kInf);
  EXPECT_TRUE(std::isnan(silu(-kInf)));  // as z s says
  EXPECT_TRUE(std::isnan(silu(kNan)));
  EXPECT_TRUE(std::isnan(silu_grad(kNan)));
}

}  // namespace
}  // namespace uniep
