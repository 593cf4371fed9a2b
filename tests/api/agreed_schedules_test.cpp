// Ranks that are processes, each with a cache of its own: rank 0 decides.
#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "group/tcp_bootstrap.h"
#include "support/forked_ranks.h"
#include "support/tuned_cache.h"
#include "tune/book/auto_schedule.h"

namespace uniep::testing {
namespace {

constexpr int kMembers = 3;
constexpr int kLimit = 20000;
const Problem kProblem{
    .hidden = 64, .intermediate = 32, .num_experts = 6, .topk = 2, .max_tokens = 100};

/// Each rank's file.
class Caches {
 public:
  std::string path(int rank) const { return folder_.file(cat("of_rank_", rank, ".json")); }

 private:
  TemporaryFolder folder_;
};

/// What each rank agreed to, in words, and what it wrote to stderr.
std::vector<std::string> agreed(const Caches& caches) {
  const int port = free_tcp_port();
  return forked_ranks(kMembers, [&](int rank) {
    const ScopedEnv env("UNIEP_TUNE_CACHE", caches.path(rank).c_str());
    TcpBootstrap bootstrap(rank, kMembers, "127.0.0.1", port, kLimit);
    ::testing::internal::CaptureStderr();
    const auto s = tune::agree_on_schedules(bootstrap, rank, kLimit, kLimit, "test", [] {
      return tune::look_up_schedules(Backend::kCpu, kProblem, {1, kMembers}, 0);
    });
    return cat(tune::origin_text(s), ", lag=", s.forward.schedule.lag, "; ",
               ::testing::internal::GetCapturedStderr());
  });
}

TEST(AgreedSchedules, AreThoseOfRank0WhateverTheOthersHave) {
  const Caches caches;
  for (int rank = 0; rank < kMembers; ++rank) {
    store_tuned(caches.path(rank), kProblem, kMembers, Pass::kForward,
                parse_schedule(cat("lag=", rank + 7)));
  }
  write_file(caches.path(2), "{");  // which nobody reads
  for (const std::string& said : agreed(caches))
    EXPECT_EQ(said, "auto: forward cache, backward default, lag=7; ");
}

TEST(AgreedSchedules, OfADamagedCacheAreTheDefaultOnAllRanksAndReportedByOne) {
  const Caches caches;
  for (const int rank : {1, 2}) {
    store_tuned(caches.path(rank), kProblem, kMembers, Pass::kForward, parse_schedule("lag=9"));
  }
  write_file(caches.path(0), "{");
  const std::vector<std::string> said = agreed(caches);
  const std::string agreement = "auto: forward default, backward default, lag=1; ";
  EXPECT_TRUE(said[0].starts_with(agreement + "uniep: " + caches.path(0) + " is ignored: "))
      << said[0];
  EXPECT_EQ(said[1], agreement);
  EXPECT_EQ(said[2], agreement);
}

TEST(AgreedSchedules, MissARankBeforeTheChoiceMayTakeItsTime) {
  const int port = free_tcp_port();
  const auto said = forked_ranks(kMembers, [&](int rank) -> std::string {
    TcpBootstrap bootstrap(rank, kMembers, "127.0.0.1", port, kLimit);
    if (rank == 2) {  // is there, and does not come
      std::this_thread::sleep_for(std::chrono::seconds(4));
      return "late";
    }
    const auto begin = std::chrono::steady_clock::now();
    try {
      tune::agree_on_schedules(bootstrap, rank, 500, kLimit, "test", [] {
        return tune::look_up_schedules(Backend::kCpu, kProblem, {1, kMembers}, 0);
      });
    } catch (const Error& e) {
      const bool soon = std::chrono::steady_clock::now() - begin < std::chrono::seconds(3);
      return cat(e.code() == ErrorCode::kTimeout && soon, ' ', e.what());
    }
    return "agreed";
  });
  EXPECT_TRUE(said[0].starts_with("1 ")) << said[0];
  EXPECT_NE(said[0].find("peer 2"), std::string::npos) << said[0];
}

TEST(AgreedSchedules, FailAlikeWhereRank0CannotChoose) {
  const int port = free_tcp_port();
  const auto said = forked_ranks(kMembers, [&](int rank) -> std::string {
    TcpBootstrap bootstrap(rank, kMembers, "127.0.0.1", port, kLimit);
    tune::agree_on_schedules(bootstrap, rank, kLimit, kLimit, "test", []() -> tune::LayerSchedules {
      throw Error(ErrorCode::kIo, "no idea");
    });
    return "agreed";
  });
  const std::string all = cat("error ", static_cast<int>(ErrorCode::kIo), ": rank 0: no idea");
  for (const std::string& s : said) EXPECT_EQ(s, all);
}

}  // namespace
}  // namespace uniep::testing
