#include "tune/model/cores.h"

#include <gtest/gtest.h>

#include <set>

#include "support/random_case.h"

namespace uniep::tune {
namespace {

TEST(Cores, EachWorkerHasOneOfItsOwn) {
  Cores cores(0);
  cores.start(1, 3, 0);
  cores.start(2, 1, 1);
  cores.start(3, 5, 1);
  EXPECT_DOUBLE_EQ(cores.next(), 2);
  EXPECT_EQ(cores.pop(), 2);
  EXPECT_DOUBLE_EQ(cores.next(), 3);
  EXPECT_EQ(cores.pop(), 1);
  EXPECT_DOUBLE_EQ(cores.next(), 6);
}

TEST(Cores, AreSharedEqually) {
  Cores cores(1);
  cores.start(1, 2, 0);
  EXPECT_DOUBLE_EQ(cores.next(), 2);
  cores.start(2, 2, 1);  // half of each from here on: 1 has 1 second left, 2 has 2
  EXPECT_DOUBLE_EQ(cores.next(), 3);
  EXPECT_EQ(cores.pop(), 1);
  EXPECT_DOUBLE_EQ(cores.next(), 4);
  EXPECT_EQ(cores.pop(), 2);
  cores.start(3, 1, 10);
  EXPECT_DOUBLE_EQ(cores.next(), 11);
}

TEST(Cores, AreNotSharedWhereThereAreEnough) {
  Cores cores(2);
  cores.start(1, 2, 0);
  cores.start(2, 3, 0);
  EXPECT_DOUBLE_EQ(cores.next(), 2);
  EXPECT_EQ(cores.pop(), 1);
  EXPECT_DOUBLE_EQ(cores.next(), 3);
}

TEST(Cores, AnyAmountsOfWorkEndInOrder) {
  testing::Rng rng(1);
  for (const std::int64_t amounts : {1, 3, 8, 100}) {  // fewer and more than there are lines
    Cores cores(0);
    std::set<std::pair<double, int>> expected;
    double now = 0;
    const auto start = [&](int unit) {
      const double work = static_cast<double>(testing::pick(rng, 1, amounts));
      cores.start(unit, work, now);
      expected.insert({now + work, unit});
    };
    for (int unit = 19; unit >= 0; --unit) start(unit);
    for (int i = 0; i < 2000; ++i) {
      const auto [end, unit] = *expected.begin();
      ASSERT_EQ(cores.next(), end) << amounts;
      ASSERT_EQ(cores.pop(), unit) << amounts;
      expected.erase(expected.begin());
      now = end;
      start(unit);
    }
  }
}

}  // namespace
}  // namespace uniep::tune
