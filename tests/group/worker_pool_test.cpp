#include "cpu/worker_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <random>
#include <set>

#include "support/address_space_limit.h"
#include "support/layer_group.h"

namespace uniep::testing {
namespace {

TEST(WorkerPool, RunsEachIndexOnceWhateverTheCount) {
  cpu::WorkerPool pool;
  std::mt19937 rng(1);
  for (int round = 0; round < 500; ++round) {
    const int count = 1 + static_cast<int>(rng() % 9);
    std::vector<std::atomic<int>> times(9);
    pool.run(count, [&](int i) { ++times[static_cast<std::size_t>(i)]; });
    for (int i = 0; i < 9; ++i) {
      ASSERT_EQ(times[static_cast<std::size_t>(i)], i < count ? 1 : 0) << round;
    }
  }
}

TEST(WorkerPool, WorkersRunAtTheSameTime) {
  cpu::WorkerPool pool;
  std::atomic<int> present{0};
  pool.run(6, [&](int) {
    ++present;
    while (present < 6) std::this_thread::yield();
  });
  EXPECT_EQ(present, 6);
}

/// Which workers of rank 0 ran dispatch tasks, and which others, in a forward pass.
struct Roles {
  std::set<int> dispatched;
  std::set<int> computed;
};

Roles roles(const std::string& schedule) {
  LayerGroup g(plain_layer(2, 60), 2);
  g.make_layers([](int) { return LayerOptions{.record_timeline = true}; });
  g.make_plans();
  g.each([&](int rank) { g.forward(rank, parse_schedule(schedule)); });
  Roles r;
  for (const TimelineEvent& e : g.layer(0).take_timeline()) {
    (e.stage == Stage::kDispatch ? r.dispatched : r.computed).insert(e.worker);
  }
  return r;
}

TEST(Workers, DispatchWorkersDispatchAndJoinTheOthersWhereTheyMay) {
  const std::string schedule = "single,tile_m=16,tile_n=64,pull_tokens=1,workers=3";
  const Roles apart = roles(schedule + ",dispatch_workers=1,dispatch_join=no");
  EXPECT_EQ(apart.dispatched, std::set<int>{0});
  EXPECT_FALSE(apart.computed.contains(0));
  bool joined = false;  // it may be late once, not always
  for (int i = 0; i < 50 && !joined; ++i) {
    joined = roles(schedule + ",dispatch_workers=1,dispatch_join=yes").computed.contains(0);
  }
  EXPECT_TRUE(joined);
  const Roles all = roles(schedule + ",dispatch_workers=3,dispatch_join=no");
  EXPECT_FALSE(all.computed.empty()) << "somebody must compute";
}

TEST(WorkerPool, ThreadsThatCannotBeStartedAreAnErrorOnEveryRank) {
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "sanitizers need address space of their own";
#endif
  LayerGroup g(plain_layer(2), 2);
  g.make_layers([](int) { return LayerOptions{.timeout_ms = 5000}; });
  g.make_plans();
  g.each([&](int rank) { g.forward(rank); });
  Schedule many;
  many.workers = 1024;  // stacks of 8 GiB
  std::vector<Outcome> outcomes;
  std::atomic<int> others{0};
  {
    const AddressSpaceLimit limit(std::int64_t{1} << 30);
    outcomes = g.attempt([&](int rank) {
      try {
        g.forward(rank, many);
      } catch (const std::system_error&) {
        ++others;
      } catch (const std::bad_alloc&) {
        ++others;
      }
    });
  }
  int errors = others;
  for (const Outcome& o : outcomes) {
    if (o.error) ++errors;
    EXPECT_LT(o.seconds, 4.5) << "nobody waits for the rank that failed";
  }
  EXPECT_EQ(errors, 2);
  g.drop_layers();
}

}  // namespace
}  // namespace uniep::testing
