#include "tune/cores.h"

#include <gtest/gtest.h>

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

}  // namespace
}  // namespace uniep::tune
