#include "reference/activation.h"

#include <gtest/gtest.h>

#include <random>

#include "base/activation_math.h"
#include "reference/arithmetic.h"
#include "reference/compare.h"

namespace uniep::reference {
namespace {

constexpr std::int64_t kRows = 16;
constexpr std::int64_t kColumns = 100;

// The rounding to bf16 hides another order of the fp32 products from all but one element in some
// hundred thousand, so these tests look at the products themselves.
struct Unrounded : ContractArithmetic {
  static float stored(float v) { return v; }
};

struct Segment {
  Matrix<float> h{kRows, 2 * kColumns};
  Matrix<float> da{kRows, kColumns};
  std::vector<float> probs;
};

Segment random_segment() {
  std::mt19937 bits(1);
  std::normal_distribution<float> normal;
  Segment s;
  for (float& v : s.h.values) v = ContractArithmetic::stored(normal(bits));
  for (float& v : s.da.values) v = ContractArithmetic::stored(normal(bits));
  for (std::int64_t r = 0; r < kRows; ++r) s.probs.push_back(normal(bits));
  return s;
}

TEST(Activation, MultipliesInTheOrderOfTheContract) {
  const Segment s = random_segment();
  Matrix<float> a(kRows, kColumns);
  Matrix<float> dh(kRows, 2 * kColumns);
  for (std::int64_t r = 0; r < kRows; ++r) {
    const float p = s.probs[static_cast<std::size_t>(r)];
    for (std::int64_t i = 0; i < kColumns; ++i) {
      const float gate = s.h.row(r)[i];
      const float up = s.h.row(r)[kColumns + i];
      const float da = s.da.row(r)[i];
      a.row(r)[i] = p * (silu(gate) * up);
      dh.row(r)[i] = ((p * da) * up) * silu_grad(gate);
      dh.row(r)[kColumns + i] = (p * da) * silu(gate);
    }
  }
  const auto got_a = activation<Unrounded>(s.h, s.probs);
  const auto got_dh = activation_dgrad<Unrounded>(s.h, s.probs, s.da);
  EXPECT_EQ(first_difference(got_a.values, a.values).count, 0);
  EXPECT_EQ(first_difference(got_dh.values, dh.values).count, 0);
}

TEST(Dprobs, EmptyLanesAndGroupsLeavePositiveZero) {
  const Matrix<float> h(2, 6);
  const Matrix<float> da(2, 3);
  const auto dp = dprobs<ContractArithmetic>(h, da);
  EXPECT_EQ(first_difference(dp, std::vector<float>(2, +0.0f)).count, 0);
}

}  // namespace
}  // namespace uniep::reference
