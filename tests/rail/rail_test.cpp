// The transport between hosts alone: what is put arrives whole and is seen behind its signal, ends
// and failures of peers are heard of, and a slow port takes its time.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <fstream>
#include <random>
#include <string>
#include <thread>

#include "rail/rails.h"
#include "support/expect_error.h"
#include "support/process_group.h"

namespace uniep::testing {
namespace {

std::vector<std::byte> pattern(std::size_t bytes, unsigned seed) {
  std::minstd_rand random(seed);
  std::vector<std::byte> all(bytes);
  for (std::byte& b : all) b = static_cast<std::byte>(random());
  return all;
}

TEST(Rail, BlocksOfAllSizesArriveWhole) {
  const std::size_t sizes[] = {0, 1, 127, 128, 129, 4096, 100000, 5000001};
  std::size_t all = 0;
  for (const std::size_t size : sizes) all += size;
  Rails rails({.hosts = 2, .local_ranks = 1}, static_cast<std::int64_t>(all));
  const std::vector<std::byte> sent = pattern(all, 1);
  std::size_t at = 0;
  for (const std::size_t size : sizes) {
    rails[0].put(1, static_cast<std::int64_t>(at), std::span(sent).subspan(at, size));
    at += size;
  }
  ASSERT_TRUE(rails[1].wait_for(std::size(sizes)));
  EXPECT_TRUE(std::equal(sent.begin(), sent.end(), rails[1].memory().begin()));
}

/// In a process that has not loaded libfabric yet.
TEST(RailDeathTest, TheProgramsSignalHandlersStay) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  for (const int number : {SIGTERM, SIGINT, SIGABRT}) {
    EXPECT_EXIT(
        {
          std::signal(number, [](int) { std::_Exit(7); });
          const Rails rails({.hosts = 2, .local_ranks = 1}, 64);
          std::raise(number);
          std::_Exit(8);
        },
        ::testing::ExitedWithCode(7), "")
        << number;
  }
}

/// The signals that the process handles, a bit each; without those of threads, which are real-time.
std::uint32_t handled_signals() {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    if (word != "SigCgt:") continue;
    status >> word;
    return static_cast<std::uint32_t>(std::stoull(word, nullptr, 16)) & 0x7fffffffu;
  }
  return 0;
}

/// Other threads take signals meanwhile.
TEST(RailDeathTest, NoOtherSignalHandlersAreThereEvenForAWhile) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto make_rails = [] {
    const std::uint32_t before = handled_signals();
    std::atomic<bool> done = false;
    std::atomic<bool> changed = false;
    std::jthread watch([&] {
      while (!done) changed = changed || handled_signals() != before;
    });
    const Rails rails({.hosts = 2, .local_ranks = 1}, 64);
    done = true;
    watch.join();
    std::_Exit(changed ? 1 : 0);
  };
  EXPECT_EXIT(make_rails(), ::testing::ExitedWithCode(0), "");
}

TEST(Rail, SegmentsGoToTheirPlacesAndSignalsToTheirRanks) {
  Rails rails({.hosts = 2, .local_ranks = 2}, 64);
  const std::vector<std::byte> sent = pattern(8, 2);
  const std::span<const std::byte> bytes(sent);
  const std::int64_t counter = rails[0].counter_at();
  rails[3].rail().put(0, RailRank::kMemory,
                      {.segments = {{40, bytes.first(3)}, {0, bytes.subspan(3)}},
                       .signals = {{counter - 4, 0, 2}, {counter, 1, 5}}});
  // In this test all ranks of a host are given the memory of one.
  ASSERT_TRUE(rails[1].wait_for(5));
  EXPECT_TRUE(std::equal(sent.begin(), sent.begin() + 3, rails[1].memory().begin() + 40));
  EXPECT_TRUE(std::equal(sent.begin() + 3, sent.end(), rails[1].memory().begin()));
  EXPECT_EQ(static_cast<int>(rails[1].memory()[static_cast<std::size_t>(counter) - 4]), 2);
  EXPECT_EQ(rails[0].count(), 0u);
}

TEST(Rail, ManyBlocksFromAllThreadsToAllHosts) {
  constexpr int kHosts = 4, kBlocks = 200;
  Rails rails({.hosts = kHosts, .local_ranks = 1}, kHosts * kBlocks);
  std::vector<std::jthread> threads;
  for (int from = 0; from < kHosts; ++from) {
    for (int half = 0; half < 2; ++half) {
      threads.emplace_back([&, from, half] {
        for (int i = half; i < kBlocks; i += 2) {
          const auto value = static_cast<std::byte>(from * 50 + i % 50);
          for (int to = 0; to < kHosts; ++to) {
            if (to != from) rails[from].put(to, from * kBlocks + i, {&value, 1});
          }
        }
      });
    }
  }
  threads.clear();
  for (int to = 0; to < kHosts; ++to) {
    ASSERT_TRUE(rails[to].wait_for((kHosts - 1) * kBlocks));
    for (int from = 0; from < kHosts; ++from) {
      for (int i = 0; i < kBlocks; ++i) {
        const auto at = static_cast<std::size_t>(from * kBlocks + i);
        ASSERT_EQ(rails[to].memory()[at],
                  to == from ? std::byte{0} : static_cast<std::byte>(from * 50 + i % 50));
      }
    }
  }
}

TEST(Rail, WhatIsPutBeforeItsMemoryIsThereOrAfterIsDropped) {
  Rails rails({.hosts = 2, .local_ranks = 1}, 8);
  const std::byte one{1};
  rails[0].rail().put(1, RailRank::kMemory + 1, {.segments = {{0, {&one, 1}}}});
  rails[0].put(1, 1, {&one, 1});
  ASSERT_TRUE(rails[1].wait_for(1));
  EXPECT_EQ(rails[1].memory()[0], std::byte{0});
  EXPECT_EQ(rails[1].memory()[1], std::byte{1});
}

TEST(Rail, ASlowPortTakesItsTime) {
  constexpr std::size_t kBytes = 1000000;
  Rails rails({.hosts = 2, .local_ranks = 1}, kBytes, 0.001);  // a second for all
  const std::vector<std::byte> sent = pattern(kBytes, 3);
  const auto begin = std::chrono::steady_clock::now();
  for (std::size_t i = 0; i < 10; ++i) {
    rails[0].put(1, static_cast<std::int64_t>(i * kBytes / 10),
                 std::span(sent).subspan(i * kBytes / 10, kBytes / 10));
  }
  const auto put = std::chrono::steady_clock::now() - begin;
  ASSERT_TRUE(rails[1].wait_for(1));
  const auto first = std::chrono::steady_clock::now() - begin;
  ASSERT_TRUE(rails[1].wait_for(10));
  const auto all = std::chrono::steady_clock::now() - begin;
  EXPECT_GE(all, std::chrono::seconds(1));
  EXPECT_LT(first, all / 2);  // they arrive one after another
  EXPECT_LT(put, all / 2);    // and nobody waited while they were put
  EXPECT_TRUE(std::equal(sent.begin(), sent.end(), rails[1].memory().begin()));
}

TEST(Rail, WhoLeavesInGoodOrderSaysSo) {
  Rails rails({.hosts = 3, .local_ranks = 1}, 8);
  const std::byte one{1};
  rails[1].put(0, 0, {&one, 1});
  rails[1].leave();
  for (const int other : {0, 2}) {
    ASSERT_TRUE(rails[other].wait([&] { return !rails[other].heard().empty(); }));
    EXPECT_EQ(rails[other].heard(), "left 1\n");
  }
  EXPECT_EQ(rails[0].count(), 1u);  // what it had put has come
  rails[0].put(2, 0, {&one, 1});    // and the others go on
  EXPECT_TRUE(rails[2].wait_for(1));
}

TEST(Rail, AnEndIsHeardOfBehindAllThatWasSent) {
  constexpr std::size_t kBytes = 500000;
  Rails rails({.hosts = 3, .local_ranks = 1}, 2 * kBytes, 0.005);  // 100 ms a block
  const std::vector<std::byte> sent = pattern(kBytes, 4);
  // Both come in at the same port: the second is late, and its end must not overtake it.
  for (const int from : {1, 2}) rails[from].put(0, 0, sent);
  std::vector<std::jthread> leaving;
  for (const int from : {1, 2}) leaving.emplace_back([&, from] { rails[from].leave(); });
  const auto heard_of_both = [&] { return rails[0].heard().size() >= 2 * sizeof("left 1"); };
  ASSERT_TRUE(rails[0].wait(heard_of_both)) << rails[0].heard();
  EXPECT_EQ(rails[0].count(), 2u);
}

TEST(Rail, WhoLeavesSendsAllFirstHoweverLongItTakes) {
  constexpr std::size_t kBytes = 300000;
  Rails rails({.hosts = 2, .local_ranks = 1}, kBytes, 0.0002);  // 1.5 s
  const std::vector<std::byte> sent = pattern(kBytes, 5);
  rails[0].put(1, 0, sent);
  rails[0].leave();
  ASSERT_TRUE(rails[1].wait([&] { return !rails[1].heard().empty(); }));
  EXPECT_EQ(rails[1].heard(), "left 0\n");
  EXPECT_EQ(rails[1].count(), 1u);
}

TEST(Rail, AFailureIsHeardOfOnAllHosts) {
  Rails rails({.hosts = 3, .local_ranks = 2}, 8);
  rails[2].fail({3, "no memory"});
  for (const int other : {0, 4}) {  // of its rail
    ASSERT_TRUE(rails[other].wait([&] { return !rails[other].heard().empty(); }));
    EXPECT_EQ(rails[other].heard(), "failed 3: no memory\n");
  }
  EXPECT_EQ(rails[1].heard(), "");
}

TEST(Rail, WhatBreaksARailIsHeardOfOnTheOthers) {
  Rails rails({.hosts = 3, .local_ranks = 1}, 8);
  rails[0].put(1, 1000, pattern(8, 6));  // which no memory has
  for (const int rank : {0, 2}) {
    ASSERT_TRUE(rails[rank].wait([&] { return !rails[rank].heard().empty(); }));
    EXPECT_EQ(rails[rank].heard().rfind("failed 1: ", 0), 0u) << rails[rank].heard();
  }
}

TEST(Rail, WhoLeavesWaitsForAPeerThatIsLate) {
  constexpr std::size_t kBytes = 64 << 20;  // more than sockets hold
  Rails rails({.hosts = 2, .local_ranks = 1}, kBytes);
  const std::vector<std::byte> sent(kBytes, std::byte{7});
  rails[1].be_late(std::chrono::milliseconds(1500));
  rails[0].put(1, 0, sent);
  rails[0].leave();
  ASSERT_TRUE(rails[1].wait([&] { return !rails[1].heard().empty(); }));
  EXPECT_EQ(rails[1].heard(), "left 0\n");
  EXPECT_EQ(rails[1].count(), 1u);
}

// What has left the sender may still lie in its library, which drops it with the connection.
TEST(Rail, WhoLeavesWaitsUntilAllHasCome) {
  Rails rails({.hosts = 2, .local_ranks = 1}, 8);
  constexpr std::chrono::milliseconds kLate(1500);
  rails[1].be_late(kLate);
  ASSERT_TRUE(rails[1].wait([&] { return rails[1].is_late(); }));
  const std::byte one{1};
  const auto begin = std::chrono::steady_clock::now();
  rails[0].put(1, 0, {&one, 1});
  rails[0].leave();
  EXPECT_GT(std::chrono::steady_clock::now() - begin, kLate / 2);
  ASSERT_TRUE(rails[1].wait([&] { return !rails[1].heard().empty(); }));
  EXPECT_EQ(rails[1].heard(), "left 0\n");
  EXPECT_EQ(rails[1].count(), 1u);
}

TEST(Rail, ManyThatLeaveAtOnceDoNotWaitForOneAnother) {
  Rails rails({.hosts = 4, .local_ranks = 1}, 8);
  const auto begin = std::chrono::steady_clock::now();
  {
    std::vector<std::jthread> leaving;
    for (int rank = 0; rank < 4; ++rank) leaving.emplace_back([&, rank] { rails[rank].leave(); });
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
}

/// A process that connects its rail, calls `last()` and is killed must be heard of at once.
template <class Last>
void expect_killed_peer_is_heard_of(Last&& last) {
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  int back[2];
  ASSERT_EQ(pipe(back), 0);
  const RankLayout layout{.hosts = 2, .local_ranks = 1};
  const pid_t child = fork();
  if (child == 0) {
    char address[64] = {};
    RailRank rank({.rank = 1, .layout = layout}, 8);
    const std::string own = rank.rail().address();
    if (write(back[1], own.c_str(), own.size() + 1) < 0) _exit(1);
    if (read(ends[0], address, sizeof(address)) < 0) _exit(1);
    rank.rail().connect({address, own}, rank.watch(), 30000);
    last();
    raise(SIGKILL);
  }
  RailRank rank({.rank = 0, .layout = layout}, 8);
  const std::string own = rank.rail().address();
  char address[64] = {};
  ASSERT_GT(read(back[0], address, sizeof(address)), 0);
  ASSERT_GT(write(ends[1], own.c_str(), own.size() + 1), 0);
  const auto begin = std::chrono::steady_clock::now();
  rank.rail().connect({own, address}, rank.watch(), 30000);
  ASSERT_TRUE(rank.wait([&] { return !rank.heard().empty(); }));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));
  EXPECT_EQ(rank.heard(), "lost 1\n");
  for (const int end : {ends[0], ends[1], back[0], back[1]}) close(end);
  waitpid(child, nullptr, 0);
}

TEST(Rail, AKilledPeerIsHeardOfAtOnce) {
  expect_killed_peer_is_heard_of([] {});
}

TEST(Rail, AKilledPeerIsHeardOfThoughItsChildrenLive) {
  const Common<std::atomic<pid_t>> left_behind;
  expect_killed_peer_is_heard_of([&] {
    const pid_t pid = fork();
    if (pid > 0) return left_behind->store(pid);
    close(STDOUT_FILENO);  // who waits for the output of this program need not wait for it
    close(STDERR_FILENO);
    for (;;) pause();
  });
  ASSERT_GT(*left_behind, 0);
  EXPECT_EQ(kill(*left_behind, SIGKILL), 0);
}

TEST(Rail, ARankOfAnotherGroupIsTurnedAway) {
  const RankLayout layout{.hosts = 2, .local_ranks = 1};
  RailRank rank({.rank = 1, .layout = layout}, 8);
  RailRank other({.rank = 0, .layout = layout, .group = 5}, 8);
  const std::vector<std::string> addresses{other.rail().address(), rank.rail().address()};
  const auto refused = [&](RailRank& at, int limit_ms) {
    EXPECT_THROW(at.rail().connect(addresses, at.watch(), limit_ms), Error);
  };
  const auto begin = std::chrono::steady_clock::now();
  std::jthread of_other([&] { refused(other, 2000); });
  refused(rank, 60000);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(30));
}

TEST(Rail, AFailureEndsConnecting) {
  RailRank waiting({.rank = 0, .layout = {.hosts = 2, .local_ranks = 1}}, 8);
  waiting.fail({1, "no memory"});
  const auto begin = std::chrono::steady_clock::now();
  expect_error(ErrorCode::kPeerFailed, "the group is unusable since rank 1 failed: no memory", [&] {
    waiting.rail().connect({waiting.rail().address(), ""}, waiting.watch(), 6000);
  });
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(4));
}

TEST(Rail, WhoNeverComesIsAnErrorAtTheLimit) {
  RailRank waiting({.rank = 0, .layout = {.hosts = 2, .local_ranks = 1}}, 8);
  expect_error(
      ErrorCode::kTimeout,
      "rank 0: wait expired after 50 ms (timeout_ms or UNIEP_TIMEOUT_MS) in stage connect, "
      "peer 1: expected 1 connections, seen 0",
      [&] {
        waiting.rail().connect({waiting.rail().address(), ""}, waiting.watch(), 50);
      });
}

}  // namespace
}  // namespace uniep::testing
