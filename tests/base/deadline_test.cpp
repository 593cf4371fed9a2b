#include "base/deadline.h"

#include <gtest/gtest.h>

#include <limits>
#include <thread>

namespace uniep {
namespace {

using std::chrono::hours;
using std::chrono::microseconds;
using std::chrono::milliseconds;

TEST(Deadline, ExpiresWhenItsTimeHasPassedAndNotBefore) {
  const auto begin = Deadline::Clock::now();
  const Deadline deadline = Deadline::in(milliseconds(20));
  while (!deadline.expired()) {
    std::this_thread::sleep_for(milliseconds(1));
  }
  EXPECT_GE(Deadline::Clock::now() - begin, milliseconds(20));
  EXPECT_FALSE(Deadline::in(hours(1)).expired());
  EXPECT_TRUE(Deadline::in(milliseconds(0)).expired());
}

TEST(Deadline, WhatRemainsIsNeverLessThanNothing) {
  EXPECT_GT(Deadline::in(hours(1)).remaining(), milliseconds(1000 * 3599));
  EXPECT_LE(Deadline::in(hours(1)).remaining(), hours(1));
  EXPECT_EQ(Deadline::in(-hours(1)).remaining(), Deadline::Clock::duration::zero());
}

TEST(Deadline, APollWaitsAsLongAsTimeIsLeft) {
  int looks = 0;
  for (int round = 0; round < 20; ++round) {
    const Deadline deadline = Deadline::in(microseconds(1500));
    for (;;) {
      const int ms = deadline.poll_ms();
      if (deadline.expired()) break;
      EXPECT_GE(ms, 1);
      EXPECT_LE(ms, 2);
      ++looks;
    }
  }
  EXPECT_GT(looks, 0);
  EXPECT_EQ(Deadline::in(-hours(1)).poll_ms(), 0);
  EXPECT_EQ(Deadline::in(hours(24 * 365)).poll_ms(), std::numeric_limits<int>::max());
}

TEST(Deadline, TheEarlierOfTwoIsTheLesser) {
  const Deadline soon = Deadline::in(milliseconds(1)), late = Deadline::in(hours(1));
  EXPECT_EQ(std::min(soon, late), soon);
  EXPECT_EQ(std::min(late, soon), soon);
}

}  // namespace
}  // namespace uniep
