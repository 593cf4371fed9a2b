#include "reference/reduce.h"

#include <gtest/gtest.h>

#include <cmath>

#include "uniep/bf16.h"

namespace uniep::reference {
namespace {

/// The token's sum over slots that hold these numbers, of four experts.
float reduced(const std::vector<std::int32_t>& experts, const std::vector<float>& rows, int groups,
              CombinePartials partials = CombinePartials::kFp32) {
  Inputs<float> in;
  in.tokens = 1;
  in.num_experts = 4;
  in.topk = static_cast<int>(experts.size());
  in.combine_groups = groups;
  in.combine_partials = partials;
  in.topk_ids = experts;
  Matrix<float> slots(in.topk, 1);
  slots.values = rows;
  return reduce<ContractArithmetic>(slots, in).front();
}

const float kLarge = std::ldexp(1.0f, 25);  // beside which 1 is lost

TEST(Reduce, OneGroupIsTheSumOverSlots) {
  EXPECT_EQ(reduced({3, 0, 1}, {1, kLarge, -kLarge}, 1), 0);
  EXPECT_EQ(reduced({3, 0, 1}, {kLarge, -kLarge, 1}, 1), 1);
}

TEST(Reduce, AddsSlotsOfAGroupFirst) {
  EXPECT_EQ(reduced({3, 0, 1}, {1, kLarge, -kLarge}, 2), 1);
  EXPECT_EQ(reduced({2, 0, 3}, {1, kLarge, -kLarge}, 2), 0);  // (kLarge) + (1 - kLarge)
}

TEST(Reduce, AddsGroupsInAscendingOrder) {
  EXPECT_EQ(reduced({0, 1, 3}, {kLarge, -kLarge, 1}, 4), 1);
  EXPECT_EQ(reduced({3, 1, 0}, {-kLarge, kLarge, 1}, 4), 0);
}

TEST(Reduce, RoundsPartialsIfToldTo) {
  const float small = std::ldexp(1.0f, -9);  // 1 + small is no bf16
  EXPECT_EQ(reduced({0, 2, 2}, {-1, 1, small}, 2), small);
  EXPECT_EQ(reduced({0, 2, 2}, {-1, 1, small}, 2, CombinePartials::kBf16), 0);
  // One group has no partial sums. A sum that underflows is -0, a partial sum that does is not.
  const float tiny = -std::ldexp(1.0f, -140);
  EXPECT_TRUE(std::signbit(reduced({0}, {tiny}, 1, CombinePartials::kBf16)));
  EXPECT_TRUE(std::signbit(reduced({0}, {tiny}, 2, CombinePartials::kFp32)));
  EXPECT_FALSE(std::signbit(reduced({0}, {tiny}, 2, CombinePartials::kBf16)));
}

TEST(Reduce, DroppedSlotsAndEmptyGroupsAreLeftOut) {
  EXPECT_EQ(reduced({-1, 3, -1}, {NAN, 2, NAN}, 4), 2);
  const float none = reduced({-1, -1}, {NAN, NAN}, 2);
  EXPECT_EQ(none, 0);
  EXPECT_FALSE(std::signbit(none));
}

}  // namespace
}  // namespace uniep::reference
