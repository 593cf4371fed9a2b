// base/activation.h against the definitions in float64, at every bf16 number: h holds no others.
#include "base/activation.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>

#include "reference/exact_activation.h"
#include "support/activations.h"
#include "uniep/bf16.h"

namespace uniep {
namespace {

using testing::kActivations;

/// Calls f(z) for every finite bf16 number up to `limit`.
template <class F>
void for_every_bf16(float limit, F f) {
  for (std::uint32_t bits = 0; bits < 0x10000u; ++bits) {
    const float z = to_float(bf16{static_cast<std::uint16_t>(bits)});
    if (std::fabs(z) <= limit) f(z);
  }
}

/// How far an fp32 result may lie off: a few roundings of the result, and of the terms of 1 + erf
/// and the like, which cancel below 0 and are multiplied by z.
double allowed(double want, float z) {
  return 6e-7 * std::fabs(want) + 1.3e-7 * (1 + std::fabs(z)) +
         std::numeric_limits<float>::denorm_min();
}

TEST(ActivationFunctions, ValuesAndSlopesAreThoseOfTheDefinitions) {
  for (const Activation activation : kActivations) {
    for_every_bf16(50, [&](float z) {
      const ValueSlope got = gate_at(activation, z);
      const reference::ExactValueSlope want = reference::exact_gate(activation, z);
      ASSERT_LE(std::fabs(got.value - want.value), allowed(want.value, z))
          << name(activation) << " of " << z;
      ASSERT_LE(std::fabs(got.slope - want.slope), allowed(want.slope, z))
          << "slope of " << name(activation) << " at " << z;
      const ValueSlope got_up = up_at(activation, z);
      const reference::ExactValueSlope want_up = reference::exact_up(activation, z);
      ASSERT_LE(std::fabs(got_up.value - want_up.value), allowed(want_up.value, z));
      ASSERT_LE(std::fabs(got_up.slope - want_up.slope), allowed(want_up.slope, z))
          << name(activation) << ", up at " << z;
    });
  }
}

/// Large numbers give z or 0, not NaN.
TEST(ActivationFunctions, AreFiniteWhereTheirResultIs) {
  for (const Activation activation : kActivations) {
    for_every_bf16(1e18f, [&](float z) {
      const ValueSlope at = gate_at(activation, z);
      ASSERT_TRUE(std::isfinite(at.value)) << name(activation) << " of " << z;
      // PyTorch's derivative of the tanh form multiplies z^3, which is infinite, by 0.
      if (activation == Activation::kGegluTanh && std::fabs(z) > 1e12f) return;
      ASSERT_TRUE(std::isfinite(at.slope)) << "slope of " << name(activation) << " at " << z;
    });
  }
}

TEST(ActivationFunctions, KinksAndLimits) {
  EXPECT_EQ(gate_at(Activation::kReglu, 0.0f).slope, 0.0f);
  EXPECT_EQ(gate_at(Activation::kRelu2, 3.0f).value, 9.0f);
  EXPECT_EQ(gate_at(Activation::kRelu2, 3.0f).slope, 6.0f);
  EXPECT_EQ(gate_at(Activation::kRelu2, -3.0f).value, 0.0f);
  // At the limit itself the gradient passes, as PyTorch's clamp has it.
  const ValueSlope at = gate_at(Activation::kGptOss, 7.0f);
  const ValueSlope beyond = gate_at(Activation::kGptOss, 7.5f);
  EXPECT_GT(at.slope, 0.9f);
  EXPECT_EQ(beyond.slope, 0.0f);
  EXPECT_EQ(beyond.value, at.value);
  EXPECT_LT(gate_at(Activation::kGptOss, -20.0f).value, 0.0f);  // clamped from above alone
  EXPECT_EQ(up_at(Activation::kGptOss, 7.0f).slope, 1.0f);
  EXPECT_EQ(up_at(Activation::kGptOss, -7.0f).slope, 1.0f);
  EXPECT_EQ(up_at(Activation::kGptOss, -9.0f).value, -6.0f);
  EXPECT_EQ(up_at(Activation::kGptOss, 9.0f).value, 8.0f);
  EXPECT_EQ(up_at(Activation::kGptOss, 9.0f).slope, 0.0f);
  EXPECT_GT(gate_at(Activation::kSwigluClamped, 10.0f).slope, 0.9f);
  EXPECT_EQ(gate_at(Activation::kSwigluClamped, 10.5f).slope, 0.0f);
  EXPECT_EQ(gate_at(Activation::kSwigluClamped, 9.0f).value,
            gate_at(Activation::kSwiglu, 9.0f).value);
  EXPECT_EQ(up_at(Activation::kSwigluClamped, 11.0f).value, 10.0f);
  EXPECT_EQ(up_at(Activation::kSwigluClamped, -11.0f).value, -10.0f);
  EXPECT_EQ(up_at(Activation::kSwigluClamped, -11.0f).slope, 0.0f);
  EXPECT_TRUE(std::signbit(up_at(Activation::kSwigluClamped, -0.0f).value));
  EXPECT_EQ(gate_at(Activation::kSwigluSoftcapped, 1000.0f).value, 4.0f);
  EXPECT_EQ(gate_at(Activation::kSwigluSoftcapped, 1000.0f).slope, 0.0f);
  EXPECT_EQ(up_at(Activation::kSwigluSoftcapped, -1000.0f).value, -25.0f);
  EXPECT_EQ(up_at(Activation::kSwigluSoftcapped, 0.0f).slope, 1.0f);
}

TEST(ActivationFunctions, KeepNaN) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const Activation activation : kActivations) {
    EXPECT_TRUE(std::isnan(gate_at(activation, nan).value)) << name(activation);
    EXPECT_TRUE(std::isnan(up_at(activation, nan).value)) << name(activation);
  }
}

}  // namespace
}  // namespace uniep
