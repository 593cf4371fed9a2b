#include <gtest/gtest.h>

#include <chrono>
#include <stdexcept>
#include <thread>

#include "support/address_space_limit.h"
#include "support/cases.h"
#include "support/expect_error.h"
#include "support/layer_group.h"

namespace uniep::testing {
namespace {

using std::chrono::milliseconds;

TEST(CpuGroup, SizesOutOfRangeAreRefused) {
  for (const int size : {-1, 0, 65}) {
    expect_invalid("group size is " + std::to_string(size) + "; 1 to 64 is accepted",
                   [&] { Communicator::cpu_group(size); });
  }
  EXPECT_EQ(Communicator::cpu_group(64).size(), 64u);
}

TEST(CpuGroup, MembersKnowTheirPlace) {
  const auto group = Communicator::cpu_group(5);
  for (int r = 0; r < 5; ++r) {
    EXPECT_EQ(group[static_cast<std::size_t>(r)].rank(), r);
    EXPECT_EQ(group[static_cast<std::size_t>(r)].size(), 5);
    EXPECT_EQ(group[static_cast<std::size_t>(r)].backend(), Backend::kCpu);
  }
}

TEST(RunRanks, RunsEveryRankAtTheSameTime) {
  std::atomic<int> present{0};
  run_ranks(Communicator::cpu_group(8), [&](Communicator&) {
    ++present;
    while (present < 8) std::this_thread::yield();
  });
  EXPECT_EQ(present, 8);
}

TEST(RunRanks, AnErrorOfARankItselfGoesBeforeReportsOfPeers) {
  const auto group = Communicator::cpu_group(3);
  for (const int origin : {0, 1, 2}) {
    expect_error(ErrorCode::kIo, "rank " + std::to_string(origin) + " has no file", [&] {
      run_ranks(group, [&](Communicator& c) {
        if (c.rank() != origin) throw Error(ErrorCode::kPeerFailed, "a peer failed");
        std::this_thread::sleep_for(milliseconds(20));  // after the reports of the others
        throw Error(ErrorCode::kIo, "rank " + std::to_string(origin) + " has no file");
      });
    });
  }
}

TEST(RunRanks, OfErrorsOfRanksThemselvesTheFirstCounts) {
  expect_error(ErrorCode::kIo, "first", [] {
    run_ranks(Communicator::cpu_group(2), [](Communicator& c) {
      std::this_thread::sleep_for(milliseconds(100 * c.rank()));
      throw Error(ErrorCode::kIo, c.rank() == 0 ? "first" : "second");
    });
  });
}

TEST(RunRanks, NobodyBeginsWhereAThreadCannotBeStarted) {
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "sanitizers need address space of their own";
#endif
  const auto group = Communicator::cpu_group(64);
  std::atomic<int> begun{0};
  {
    const AddressSpaceLimit limit(std::int64_t{200} << 20);  // stacks take 512 MiB
    EXPECT_THROW(run_ranks(group, [&](Communicator&) { ++begun; }), Error);
  }
  EXPECT_EQ(begun, 0);
  run_ranks(group, [&](Communicator&) { ++begun; });
  EXPECT_EQ(begun, 64);
}

TEST(RunRanks, AReportOfAPeerIsBetterThanNothing) {
  expect_error(ErrorCode::kPeerFailed, "a peer failed", [] {
    run_ranks(Communicator::cpu_group(2), [](Communicator& c) {
      if (c.rank() == 1) throw Error(ErrorCode::kPeerFailed, "a peer failed");
    });
  });
}

TEST(RunRanks, ABodysOwnExceptionBetweenCallsComesThroughAndEndsTheOthers) {
  LayerGroup g(plain_layer(3), 3);
  g.make_layers([](int) { return LayerOptions{.timeout_ms = 60000}; });
  std::atomic<int> ended_with_errors{0};
  const auto begin = std::chrono::steady_clock::now();
  const auto step = [&](Communicator& c) {
    const RoutingPlan plan = g.layer(c.rank()).plan(g.split().topk_ids(c.rank()));
    if (c.rank() == 1) throw std::runtime_error("the data loader ran dry");
    try {
      g.layer(c.rank()).forward(plan, g.forward_args(c.rank()));
    } catch (const Error& e) {
      EXPECT_STATES(e.what(), "the group is unusable since rank 1 failed: the data loader ran dry");
      EXPECT_TRUE(std::string(e.what()).ends_with("the data loader ran dry")) << e.what();
      ++ended_with_errors;
      throw;
    }
  };
  try {
    run_ranks(g.group(), step);
    ADD_FAILURE() << "no exception";
  } catch (const std::runtime_error& e) {
    EXPECT_STREQ(e.what(), "the data loader ran dry");
  }
  EXPECT_EQ(ended_with_errors, 2);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(30)) << "at once";
}

}  // namespace
}  // namespace uniep::testing
