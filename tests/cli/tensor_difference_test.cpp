#include "compare/tensor_difference.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>

#include "support/expect_error.h"

namespace uniep::tool {
namespace {

using testing::expect_invalid;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

template <class T>
TensorDifference difference(const std::vector<T>& a, const std::vector<T>& b,
                            std::vector<std::int64_t> shape = {}) {
  if (shape.empty()) shape = {static_cast<std::int64_t>(a.size())};
  return difference_of(io::make_tensor<T>("t", shape, a), io::make_tensor<T>("t", shape, b));
}

TEST(TensorDifference, EqualBitsAreNoDifferenceWhateverTheyMean) {
  const std::vector<float> values = {0.0f, -0.0f, kNaN, kInfinity, -kInfinity, 1.5f};
  const TensorDifference d = difference(values, values);
  EXPECT_EQ(d.elements, 6);
  EXPECT_EQ(d.differing, 0);
  EXPECT_EQ(d.differing_bits, 0);
  EXPECT_EQ(d.not_finite, 0);
  EXPECT_EQ(d.largest, 0);
  EXPECT_EQ(d.relative_l2, 0);
  EXPECT_FALSE(d.first);
}

TEST(TensorDifference, DistancesAreThoseOfTheNumbers) {
  const TensorDifference d = difference<float>({3, 4, 0}, {3, 4, 2.5});
  EXPECT_EQ(d.differing, 1);
  EXPECT_EQ(d.largest, 2.5);
  EXPECT_EQ(d.relative_l2, 0.5);
  EXPECT_EQ(d.differing_bits, std::popcount(std::bit_cast<std::uint32_t>(2.5f)));
  EXPECT_TRUE(std::isinf(difference<float>({0, 0}, {0, 1}).relative_l2));
  EXPECT_EQ(difference<double>({1e-300}, {2e-300}).largest, 1e-300);
  EXPECT_EQ(difference<double>({1e300}, {2e300}).relative_l2, 1);
  const std::int64_t large = std::int64_t{1} << 53;
  EXPECT_EQ(difference<std::int64_t>({large}, {large + 1}).largest, 1);
  EXPECT_EQ(difference<std::int64_t>({-1, 7}, {2, 7}).largest, 3);
  EXPECT_EQ(difference<std::int32_t>({-1, 7}, {2, 7}).largest, 3);
}

TEST(TensorDifference, ZerosOfTwoSignsDifferByABit) {
  const TensorDifference d = difference<bf16>({bf16{0x8000}}, {bf16{0}});
  EXPECT_EQ(d.differing, 1);
  EXPECT_EQ(d.differing_bits, 1);
  EXPECT_EQ(d.largest, 0);
  EXPECT_EQ(d.relative_l2, 0);
}

TEST(TensorDifference, WhatIsNotFiniteIsCountedAndHasNoDistance) {
  const TensorDifference d =
      difference<float>({kNaN, 1, kInfinity, kInfinity, 2}, {1, kNaN, -kInfinity, kInfinity, 3});
  EXPECT_EQ(d.differing, 4);
  EXPECT_EQ(d.not_finite, 3);
  EXPECT_EQ(d.largest, 1);
  EXPECT_EQ(d.relative_l2, 0.5);
  const TensorDifference nans = difference<bf16>({bf16{0x7fc0}}, {bf16{0x7fc1}});
  EXPECT_EQ(nans.differing, 1);
  EXPECT_EQ(nans.not_finite, 1);
}

TEST(TensorDifference, AnEmptyTensorEqualsAnother) {
  const TensorDifference d = difference<float>({}, {}, {0, 16});
  EXPECT_EQ(d.elements, 0);
  EXPECT_EQ(d.differing, 0);
  EXPECT_EQ(d.relative_l2, 0);
}

TEST(TensorDifference, TheFirstDifferenceHasItsPlace) {
  std::vector<bf16> a(2 * 3 * 4);
  std::vector<bf16> b = a;
  b[17] = bf16{0x3f80};
  b[20] = bf16{0x4000};
  const TensorDifference d = difference(a, b, {2, 3, 4});
  ASSERT_TRUE(d.first);
  EXPECT_EQ(d.first->index, (std::vector<std::int64_t>{1, 1, 1}));
  EXPECT_EQ(d.first->a_bits, 0u);
  EXPECT_EQ(d.first->b_bits, 0x3f80u);
  EXPECT_EQ(d.differing, 2);
}

TEST(TensorDifference, PlacesAreNamedAsTensorsOfALayerAre) {
  EXPECT_EQ(place_text("dw1", {1, 2, 3}), "expert 1, row 2, column 3");
  EXPECT_EQ(place_text("out", {5, 6}), "token 5, column 6");
  EXPECT_EQ(place_text("dprobs", {5, 0}), "token 5, slot 0");
  EXPECT_EQ(place_text("out", {5}), "[5]") << "another program's tensor";
  EXPECT_EQ(place_text("bias", {4, 2}), "[4, 2]");
}

TEST(TensorDifference, AnElementIsShownWithItsBits) {
  EXPECT_EQ(element_text(io::DType::kBf16, 0x3f00), "0.5 (0x3f00)");
  EXPECT_EQ(element_text(io::DType::kBf16, 0xffc0), "NaN (0xffc0)");
  EXPECT_EQ(element_text(io::DType::kF32, 0x80000000), "-0 (0x80000000)");
  EXPECT_EQ(element_text(io::DType::kF64, std::bit_cast<std::uint64_t>(0.1)),
            "0.10000000000000001 (0x3fb999999999999a)");
  EXPECT_EQ(element_text(io::DType::kI32, 0xffffffff), "-1 (0xffffffff)");
  EXPECT_EQ(element_text(io::DType::kI64, 9007199254740993),
            "9007199254740993 (0x0020000000000001)");
}

TEST(TensorDifference, OtherShapesAreRefused) {
  const std::vector<float> values(4);
  const auto a = io::make_tensor<float>("t", {2, 2}, values);
  const auto b = io::make_tensor<float>("t", {4}, values);
  expect_invalid("comparing tensors of different shapes or types", [&] { difference_of(a, b); });
}

}  // namespace
}  // namespace uniep::tool
