// The emulated link: it takes its time, and changes nothing else.
#include "group/link.h"

#include <gtest/gtest.h>

#include "group/signal_courier.h"
#include "support/cases.h"
#include "support/layer_group.h"
#include "support/run_layer.h"
#include "support/scoped_env.h"

namespace uniep::testing {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

TEST(Link, TransfersTakeBytesOverSpeedPlusLatency) {
  Link link(0.001, 50);  // 1 MB/s: a byte takes a microsecond
  const auto t = Clock::now();
  EXPECT_EQ(link.reserve(0, 1, 1000, t), t + microseconds(1050));
}

TEST(Link, OneRanksTransfersOfADirectionFollowOneAnother) {
  Link link(0.001, 0);
  const auto t = Clock::now();
  EXPECT_EQ(link.reserve(0, 1, 1000, t), t + milliseconds(1));
  EXPECT_EQ(link.reserve(0, 2, 1000, t), t + milliseconds(2)) << "the sender's port is busy";
  EXPECT_EQ(link.reserve(1, 2, 1000, t), t + milliseconds(3)) << "the receiver's port is busy";
  EXPECT_EQ(link.reserve(2, 1, 1000, t), t + milliseconds(2)) << "full duplex";
}

TEST(Link, LatencyDoesNotOccupyThePorts) {
  Link link(0.001, 5000);
  const auto t = Clock::now();
  EXPECT_EQ(link.reserve(0, 1, 1000, t), t + milliseconds(6));
  EXPECT_EQ(link.reserve(0, 1, 1000, t), t + milliseconds(7));
}

TEST(Link, TransfersToOneselfAndWithoutALinkTakeNoTime) {
  Link link(0.001, 50);
  const auto t = Clock::now();
  EXPECT_EQ(link.reserve(1, 1, 1 << 20, t), t);
  EXPECT_EQ(link.reserve(1, 0, 1000, t), t + microseconds(1050)) << "nor a port";
  Link none(0, 50);
  EXPECT_FALSE(none.enabled());
  EXPECT_EQ(none.reserve(0, 1, 1 << 20, t), t);
}

TEST(Link, AHolderThatIsGoneKeepsNobodyForLong) {
  const auto board = std::make_shared<LinkBoard>();
  board->holder = 12345;  // was killed over its booking
  Link link(board, 0.001, 0);
  const auto t = Clock::now();
  EXPECT_EQ(link.reserve(0, 1, 1000, t), t + milliseconds(1));
  EXPECT_GE(Clock::now() - t, milliseconds(100)) << "it might have gone on";
  EXPECT_EQ(board->holder, 0u);
  EXPECT_EQ(link.reserve(0, 1, 1000, t), t + milliseconds(2));
}

TEST(Link, ManyWorkersBookOneAfterTheOther) {
  const auto board = std::make_shared<LinkBoard>();
  constexpr int kWorkers = 4, kBookings = 500;
  const auto t = Clock::now();
  std::vector<std::thread> workers;
  for (int w = 0; w < kWorkers; ++w) {
    workers.emplace_back([&, w] {
      Link link(board, 0.001, 0);  // as a process has it
      for (int i = 0; i < kBookings; ++i) link.reserve(w % 2, 2, 1000, t);
    });
  }
  for (std::thread& worker : workers) worker.join();
  Link link(board, 0.001, 0);
  EXPECT_EQ(link.reserve(3, 2, 1000, t), t + milliseconds(kWorkers * kBookings + 1));
}

TEST(EmulatedLink, GivesTheSameBits) {
  const ScopedEnv speed("UNIEP_CPU_LINK_GBPS", "0.02");
  const ScopedEnv latency("UNIEP_CPU_LINK_LATENCY_US", "100");
  const int count = cases(60);
  for (unsigned seed = 1; seed <= static_cast<unsigned>(count); ++seed) {
    Rng rng(seed);
    const int ranks = static_cast<int>(pick(rng, 2, 4));
    const LayerData data = random_layer(rng, ranks, {.max_tokens = 24, .max_hidden = 40});
    RunOptions o;
    o.token_begin = random_parts(rng, data.tokens, ranks);
    o.forward_schedule = random_schedule(rng, {}, 3);
    o.backward_schedule = random_schedule(rng, {}, 3);
    expect_same_bits(run_layer(data, o), reference::contract(data), to_string(o.forward_schedule));
    if (HasFailure()) return;
  }
}

TEST(EmulatedLink, APassTakesAtLeastItsBytesOverTheSpeed) {
  constexpr double kBytesPerSecond = 1e6;
  const ScopedEnv speed("UNIEP_CPU_LINK_GBPS", "0.001");
  const ScopedEnv latency("UNIEP_CPU_LINK_LATENCY_US", "0");
  for (const char* schedule : {"single", "sequential", "pipelined:2", "single,push_depth=16"}) {
    LayerGroup g(plain_layer(2), 2);
    g.make_layers();
    g.make_plans();
    const auto expect_time = [&] {
      for (int rank = 0; rank < 2; ++rank) {
        const PassStats& own = g.layer(rank).last_pass();
        const PassStats& peer = g.layer(1 - rank).last_pass();
        EXPECT_GT(own.pulled_bytes, 0);
        // What the peer pulls and what this rank pushes leave through the same port.
        const auto out = static_cast<double>(peer.pulled_bytes + own.pushed_bytes);
        const double slowest = std::max(own.elapsed_s, peer.elapsed_s);
        EXPECT_GE(slowest, out / kBytesPerSecond) << schedule;
      }
    };
    g.each([&](int rank) { g.forward(rank, parse_schedule(schedule)); });
    expect_time();
    g.each([&](int rank) { g.backward(rank, parse_schedule(schedule)); });
    expect_time();
    g.expect_contract(schedule);
  }
}

TEST(EmulatedLink, APassTakesAtLeastTheLatencyThereAndBack) {
  const ScopedEnv speed("UNIEP_CPU_LINK_GBPS", "100");
  const ScopedEnv latency("UNIEP_CPU_LINK_LATENCY_US", "30000");
  LayerGroup g(plain_layer(2), 2);
  g.make_layers();
  g.make_plans();
  g.each([&](int rank) { g.forward(rank); });
  for (int rank = 0; rank < 2; ++rank) EXPECT_GE(g.layer(rank).last_pass().elapsed_s, 0.06);
}

TEST(EmulatedLink, PushDepthIsHowManyTilesAWorkerDoesNotAwait) {
  constexpr double kBytesPerSecond = 1e4;  // so slow that what is computed meanwhile is nothing
  const ScopedEnv speed("UNIEP_CPU_LINK_GBPS", "0.00001");
  const ScopedEnv latency("UNIEP_CPU_LINK_LATENCY_US", "0");
  const auto seconds_awaiting_pushes = [&](int depth) {
    LayerGroup g(plain_layer(2), 2);
    g.make_layers();
    g.make_plans();
    Schedule schedule;
    schedule.workers = 1;
    schedule.push_depth = depth;
    g.each([&](int rank) { g.forward(rank, schedule); });
    return std::pair(g.layer(0).last_pass()[Stage::kFc2].link_s,
                     static_cast<double>(g.layer(0).last_pass().pushed_bytes) / kBytesPerSecond);
  };
  const auto [all, transfer] = seconds_awaiting_pushes(0);
  EXPECT_GE(all, 0.8 * transfer);
  EXPECT_LT(seconds_awaiting_pushes(16).first, 0.2 * transfer) << "there are fewer tiles";
}

TEST(EmulatedLink, AnErrorEndsTransfersThatOthersAwait) {
  const ScopedEnv speed("UNIEP_CPU_LINK_GBPS", "0.000001");  // pulls take 6 seconds
  const ScopedEnv latency("UNIEP_CPU_LINK_LATENCY_US", "0");
  LayerGroup g(plain_layer(2, 40), 2);
  g.make_layers([](int) { return LayerOptions{.timeout_ms = 100}; });
  g.make_plans();
  Schedule schedule;
  schedule.workers = 2;  // one dispatches; the other waits for it, and gives up
  schedule.pull_tokens = 64;
  const auto outcomes = g.attempt([&](int rank) { g.forward(rank, schedule); });
  for (const Outcome& o : outcomes) {
    EXPECT_TRUE(o.error);
    EXPECT_LT(o.seconds, 3);
  }
}

// Pushes are under way for seconds when a wait expires. Layers, plans and communicators go away
// under them; AddressSanitizer, or a fault on an unmapped page, would tell.
TEST(EmulatedLink, ErrorsWhilePushesAreUnderWayTouchNoFreedMemory) {
  const ScopedEnv speed("UNIEP_CPU_LINK_GBPS", "0.00001");
  const ScopedEnv latency("UNIEP_CPU_LINK_LATENCY_US", "1000");
  for (const int withhold_rank : {-1, 1}) {  // reduce gives up; a rank does while others push
    LayerGroup g(plain_layer(3), 3);
    g.make_layers([&](int) {
      return LayerOptions{.timeout_ms = 120, .fault_injection = {.withhold_rank = withhold_rank}};
    });
    g.make_plans();
    Schedule schedule;
    schedule.workers = 1;  // pulls first, without a limit; then pushes, which reduce waits for
    schedule.push_depth = 16;
    const auto outcomes = g.attempt([&](int rank) {
      g.forward(rank, schedule);
      g.layer(rank).plan(g.split().topk_ids(rank));
    });
    for (const Outcome& o : outcomes) EXPECT_TRUE(o.error);
    g.drop_layers();
    std::this_thread::sleep_for(milliseconds(150));  // signals arrive after the layers are gone
  }
}

TEST(SignalCourier, DeliversInTheOrderOfTimesAndDropsWhatIsDueAfterItsEnd) {
  const auto counter = std::make_shared<std::uint32_t>(0);
  const auto seen = [&] { return std::atomic_ref(*counter).load(); };
  {
    SignalCourier courier;
    const auto now = Clock::now();
    courier.send(now + std::chrono::hours(1), counter, {{counter.get(), 100}});
    courier.send(now + milliseconds(60), counter, {{counter.get(), 10}});
    courier.send(now + milliseconds(20), counter, {{counter.get(), 1}});
    EXPECT_EQ(seen(), 0u);
    while (seen() == 0) std::this_thread::yield();
    EXPECT_GE(Clock::now(), now + milliseconds(20));
    EXPECT_EQ(seen() % 10, 1u);
    while (seen() != 11) std::this_thread::yield();
    EXPECT_GE(Clock::now(), now + milliseconds(60));
  }
  EXPECT_EQ(seen(), 11u);
  EXPECT_EQ(counter.use_count(), 1);
}

TEST(SignalCourier, FinishesWhatWasSentUnlessThatIsGivenUp) {
  const auto counter = std::make_shared<std::uint32_t>(0);
  const auto seen = [&] { return std::atomic_ref(*counter).load(); };
  SignalCourier courier;
  courier.send(Clock::now() + milliseconds(50), counter, {{counter.get(), 1}});
  courier.finish([] { return false; });
  EXPECT_EQ(seen(), 1u);
  courier.send(Clock::now() + std::chrono::hours(1), counter, {{counter.get(), 1}});
  int asked = 0;
  courier.finish([&] { return ++asked > 3; });
  EXPECT_EQ(seen(), 1u);
}

TEST(SignalCourier, KeepsTheCountersMemoryUntilItHasDelivered) {
  SignalCourier courier;
  auto memory = std::make_shared<std::uint32_t>(0);
  const std::weak_ptr<std::uint32_t> watch = memory;
  courier.send(Clock::now() + milliseconds(30), memory, {{memory.get(), 1}});
  memory.reset();
  EXPECT_FALSE(watch.expired());
  while (!watch.expired()) std::this_thread::yield();
}

}  // namespace
}  // namespace uniep::testing
