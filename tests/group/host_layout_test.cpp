#include "group/host_layout.h"

#include <gtest/gtest.h>

#include "base/check.h"
#include "support/expect_error.h"
#include "support/scoped_env.h"

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
  const auto refused = [](const std::vector<std::string>& ids, int first, int other, int host) {
    expect_invalid(cat("the group has ", first, " ranks on its first host and ", other, " on host ",
                       host, "; as many on every host are accepted"),
                   [&] { layout_of_group(ids, kUnset4); });
  };
  refused({"a", "a", "a", "b"}, 3, 1, 1);
  refused({"a", "b", "b", "b"}, 1, 3, 1);
  refused({"a", "a", "b", "c"}, 2, 1, 1);
  refused({"a", "b", "c", "c"}, 1, 2, 2);
}

TEST(HostLayout, RanksOfAHostStandTogether) {
  const auto refused = [](const std::vector<std::string>& ids, int a, int b, int between) {
    expect_invalid(cat("ranks ", a, " and ", b, " of the group are on one host, and rank ", between,
                       " is on another; the ranks of each host one after another are accepted"),
                   [&] { layout_of_group(ids, kUnset4); });
  };
  refused({"a", "b", "a", "b"}, 0, 2, 1);
  refused({"a", "b", "b", "a"}, 0, 3, 2);
  refused({"a", "b", "c", "b"}, 1, 3, 2);
}

TEST(HostLayout, SeveralHostsAreSeveralWhateverIsWanted) {
  EXPECT_TRUE(are_several({"a", "b"}));
  EXPECT_FALSE(are_several({"a", "a"}));
}

TEST(HostLayout, ThoseOfAHostAreCountedWhateverIsWanted) {
  EXPECT_EQ(ranks_beside({"a", "a", "b", "b"}, 3), 2);
  EXPECT_EQ(ranks_beside({"a", "a", "a", "a"}, 0), 4);
  EXPECT_EQ(ranks_beside({"a", "b", "c", "d"}, 2), 1);
}

TEST(HostLayout, AHostIsKnownByItsNameOrItsBoot) {
  {
    const ScopedEnv unset("UNIEP_HOST_ID", "");
    EXPECT_GE(host_id().size(), 32u);
    EXPECT_EQ(host_id(), host_id());
  }
  const ScopedEnv given("UNIEP_HOST_ID", "left half");
  EXPECT_EQ(host_id(), "left half");
}

TEST(HostLayout, GpusAreOfOneHost) {
  require_backend_of({.hosts = 1, .local_ranks = 8}, Backend::kCuda);
  require_backend_of({.hosts = 2, .local_ranks = 2}, Backend::kCpu);
  expect_error(ErrorCode::kUnsupported,
               "the group's ranks are on 2 hosts; the CUDA backend accepts one host (and "
               "UNIEP_HOSTS=1, or not set)",
               [] { require_backend_of({.hosts = 2, .local_ranks = 2}, Backend::kCuda); });
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
