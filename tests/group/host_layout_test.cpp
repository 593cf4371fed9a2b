#include "group/host_layout.h"

#include <gtest/gtest.h>

#include "base/check.h"
#include "support/expect_error.h"

namespace uniep::testing {
namespace {

const std::vector<std::int32_t> kUnset4(4, 0);

TEST(HostLayout, EqualHostsAreFound) {
  EXPECT_EQ(layout_of_group({"a", "a", "a", "a"}, kUnset4), (RankLayout{1, 4}));
  EXPECT_EQ(layout_of_group({"a", "a", "b", "b"}, kUnset4), (RankLayout{2, 2}));
  EXPECT_EQ(layout_of_group({"d", "c", "b", "a"}, kUnset4), (RankLayout{4, 1}));
  EXPECT_EQ(layout_of_group({"a"}, {0}), (RankLayout{1, 1}));
}

TEST(HostLayout, UnequalOnesAreRefused) {
  const auto refused = [](const std::vector<std::string>& ids, int hosts, int last) {
    expect_invalid(
        cat("the group's 4 ranks are on ", hosts, " hosts, and the first of them has ranks 0 to ",
            last, "; as many consecutive ranks on every host are accepted"),
        [&] { layout_of_group(ids, kUnset4); });
  };
  refused({"a", "a", "a", "b"}, 2, 2);
  refused({"a", "b", "b", "b"}, 2, 0);
  refused({"a", "b", "a", "b"}, 2, 0);
  refused({"a", "b", "b", "a"}, 2, 0);
  refused({"a", "a", "b", "c"}, 3, 1);
}

TEST(HostLayout, WhatIsWantedGoesBefore) {
  EXPECT_EQ(layout_of_group({"a", "a", "a", "a"}, {2, 2, 2, 2}), (RankLayout{2, 2}));
  EXPECT_EQ(layout_of_group({"a", "b", "b", "b"}, {1, 1, 1, 1}), (RankLayout{1, 4}));
  expect_invalid(
      "UNIEP_HOSTS is 3 in a group of 4 ranks; hosts are equal, so a divisor of 4 is accepted", [] {
        layout_of_group({"a", "a", "a", "a"}, {3, 3, 3, 3});
      });
  expect_invalid(
      "UNIEP_HOSTS is 2 on rank 0 and 0 on rank 3; the same on all ranks of a group is accepted "
      "(0: not set)",
      [] {
        layout_of_group({"a", "a", "a", "a"}, {2, 2, 2, 0});
      });
}

}  // namespace
}  // namespace uniep::testing
