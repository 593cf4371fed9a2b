#include "reference/compare.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "uniep/error.h"

namespace uniep::reference {
namespace {

using Doubles = std::vector<double>;

TEST(RelativeL2, IsTheNormOfTheErrorOverTheNormOfWhatIsWanted) {
  EXPECT_DOUBLE_EQ(relative_l2(Doubles{3, 4.5}, Doubles{3, 4}), 0.1);
  EXPECT_EQ(relative_l2(Doubles{}, Doubles{}), 0);
  EXPECT_EQ(relative_l2(Doubles{0, 0}, Doubles{0, 0}), 0);
  EXPECT_TRUE(std::isinf(relative_l2(Doubles{1}, Doubles{0})));
  EXPECT_TRUE(std::isnan(relative_l2(Doubles{std::nan("")}, Doubles{1})));
  EXPECT_THROW(relative_l2(Doubles{1}, Doubles{}), Error);
}

TEST(FirstDifference, ComparesBits) {
  const std::vector<float> a{0.0f, 1, 2, std::numeric_limits<float>::quiet_NaN()};
  auto b = a;
  EXPECT_EQ(first_difference(a, b).index, -1);
  EXPECT_EQ(first_difference(a, b).count, 0);
  b[0] = -0.0f;
  b[2] = 3;
  EXPECT_EQ(first_difference(a, b).index, 0);
  EXPECT_EQ(first_difference(a, b).count, 2);
  b.pop_back();
  EXPECT_THROW(first_difference(a, b), Error);
}

TEST(ToDouble, IsExact) {
  EXPECT_EQ(to_double(std::vector<bf16>{{0x3f80}, {0xbe00}}), (Doubles{1, -0.125}));
  EXPECT_EQ(to_double(std::vector<float>{0.1f}), (Doubles{static_cast<double>(0.1f)}));
}

}  // namespace
}  // namespace uniep::reference
