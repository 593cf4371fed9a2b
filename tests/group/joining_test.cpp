// Groups that come from callbacks: who fits together, and who does not.
#include "group/joining.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <thread>

#include "support/expect_error.h"
#include "support/process_group.h"

namespace uniep::testing {
namespace {

using Tamper = std::function<void(int rank, GroupOptions& options)>;

/// What each of `size` processes says that joins a group under options of its own.
std::vector<std::string> join(int size, const Tamper& tamper) {
  const Common<MeetingPlace> place;
  Crew crew(size, [&](int rank) {
    GroupOptions options = place->options(rank, size);
    tamper(rank, options);
    const GroupMember member = join_group(options);
    EXPECT_EQ(member.rank, rank);
    EXPECT_EQ(member.size, size);
    const auto all = member.bootstrap->all_gather(cat(rank), "plan", 60000);
    EXPECT_EQ(all.size(), static_cast<std::size_t>(size));
    return all.back();
  });
  std::vector<std::string> said;
  for (const Crew::End& end : crew.ends()) said.push_back(end.said);
  return said;
}

void expect_all(const std::vector<std::string>& said, const std::string& want) {
  for (std::size_t r = 0; r < said.size(); ++r) EXPECT_EQ(said[r], want) << "rank " << r;
}

std::string error(ErrorCode code, const std::string& sentence) {
  return cat("error ", static_cast<int>(code), ": ", sentence);
}

std::string invalid(const std::string& sentence) {
  return error(ErrorCode::kInvalidArgument, sentence);
}

TEST(JoinGroup, TheCallbackIsCalledOnceAndThenNoMore) {
  expect_all(join(3,
                  [](int, GroupOptions& options) {
                    options.all_gather = [gather = options.all_gather, calls = 0](
                                             auto own, auto all) mutable {
                      EXPECT_EQ(++calls, 1);
                      gather(own, all);
                    };
                  }),
             "2");
}

TEST(JoinGroup, AGroupOfOneNeedsNoCallback) {
  const GroupMember member = join_group({});
  EXPECT_EQ(member.size, 1);
  EXPECT_EQ(member.bootstrap->all_gather("own", "plan", 1000), std::vector<std::string>{"own"});
  EXPECT_EQ(Communicator::from_callbacks({}).size(), 1);
}

TEST(JoinGroup, WhatNobodyElseHearsOfIsRefusedHere) {
  for (const int size : {-1, 0, 65}) {
    expect_invalid(cat("group size is ", size, "; 1 to 64 is accepted"),
                   [&] { join_group({.rank = 0, .size = size, .all_gather = {}}); });
  }
  expect_invalid(
      "all_gather of a group of 2 is empty; a function that gathers bytes of all ranks is accepted",
      [] { join_group({.rank = 0, .size = 2, .all_gather = {}}); });
}

TEST(JoinGroup, WhatARankRefusesAllRefuse) {
  expect_all(join(3, [](int rank, GroupOptions& o) { o.rank = rank == 1 ? 3 : rank; }),
             invalid("rank 1: group rank is 3; 0 to 2 is accepted in a group of 3"));
  expect_all(join(2, [](int rank, GroupOptions& o) { o.timeout_ms = rank == 1 ? -5 : 0; }),
             invalid("rank 1: timeout_ms of the group is -5; 1 to 3000000 is accepted, and 0 for "
                     "UNIEP_TIMEOUT_MS"));
}

TEST(JoinGroup, RanksMustWantTheSameGroup) {
  expect_all(join(3, [](int rank, GroupOptions& o) { o.rank = rank == 2 ? 1 : rank; }),
             invalid("all_gather of the group put the bytes of rank 1 in place 2; rank after rank "
                     "is accepted"));
  expect_all(join(2,
                  [](int rank, GroupOptions& o) {
                    if (rank == 1) o.backend = Backend::kCuda;
                  }),
             invalid("ranks 0 and 1 differ in the backend of their group; the same on all ranks "
                     "of a group is accepted"));
  expect_all(join(2,
                  [](int, GroupOptions& o) {
                    o.all_gather = [gather = o.all_gather](auto own, auto all) {
                      gather(own, all);
                      std::fill(all.begin() + static_cast<std::ptrdiff_t>(own.size()), all.end(),
                                std::byte{1});
                    };
                  }),
             invalid("all_gather of the group put bytes in place 1 that no rank passed; those of "
                     "every rank, rank after rank, are accepted"));
}

/// Rank 1's card with another text in the place of `text`.
Tamper replaced_on_rank_1(const std::string& text) {
  return [text](int, GroupOptions& o) {
    o.all_gather = [text, gather = o.all_gather](auto own, auto all) {
      gather(own, all);
      std::string bytes(reinterpret_cast<const char*>(all.data()), all.size());
      const std::size_t at = bytes.find(text, own.size());
      ASSERT_NE(at, std::string::npos) << text;
      all[at] = std::byte{'?'};
    };
  };
}

TEST(JoinGroup, RanksMustBeOfOneHostAndOneVersion) {
  std::string boot_id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot_id;
  ASSERT_FALSE(boot_id.empty());
  expect_all(join(2, replaced_on_rank_1(boot_id)),
             error(ErrorCode::kUnsupported,
                   "ranks 0 and 1 run on different hosts; a group whose ranks are all on one host "
                   "is accepted, and of CPU ranks that join by RANK and its companions in the "
                   "environment one on several"));
  expect_all(join(2, replaced_on_rank_1("0.1.0")),
             invalid("ranks 0 and 1 differ in the version of uniep; the same on all ranks of a "
                     "group is accepted"));
}

TEST(JoinGroup, WhatTheCallbackThrowsComesThrough) {
  GroupOptions options{.rank = 0, .size = 2, .all_gather = [](auto, auto) {
                         throw std::runtime_error("the launcher is gone");
                       }};
  EXPECT_THROW(join_group(options), std::runtime_error);
}

TEST(JoinGroup, ARankThatDiesBeforeItHasJoinedIsNamedAtOnce) {
  for (const int victim : {0, 2}) {
    const Common<MeetingPlace> place;
    Crew crew(3, [&](int rank) {
      GroupOptions options = place->options(rank, 3);
      options.timeout_ms = 60000;
      options.all_gather = [=, gather = options.all_gather](auto own, auto all) {
        gather(own, all);
        if (rank == victim) _exit(0);
        // Comes to rank 0 after that has seen the end, and hears of it all the same.
        if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(400));
      };
      return cat(join_group(options).size);
    });
    const pid_t pid = crew.pid(victim);
    const auto ends = crew.ends();
    for (int rank = 0; rank < 3; ++rank) {
      const Crew::End& end = ends[static_cast<std::size_t>(rank)];
      if (rank == victim) continue;
      EXPECT_EQ(end.said, error(ErrorCode::kPeerFailed,
                                cat("rank ", victim, " was lost: process ", pid, " ended")));
      EXPECT_LT(end.seconds, 30);
    }
  }
}

TEST(JoinGroup, TheEnvironmentIsAnotherSource) {
  const int port = free_tcp_port();
  Crew crew(2, [&](int rank) {
    setenv("RANK", cat(rank).c_str(), 1);
    setenv("WORLD_SIZE", "2", 1);
    setenv("LOCAL_RANK", cat(rank).c_str(), 1);
    setenv("MASTER_ADDR", "127.0.0.1", 1);
    setenv("MASTER_PORT", cat(port).c_str(), 1);
    const Communicator member = Communicator::cpu_from_environment();
    EXPECT_EQ(member.size(), 2);
    EXPECT_EQ(member.backend(), Backend::kCpu);
    return cat(member.rank());
  });
  const auto ends = crew.ends();
  EXPECT_EQ(ends[0].said, "0");
  EXPECT_EQ(ends[1].said, "1");
  for (const char* name : {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}) {
    unsetenv(name);
  }
  EXPECT_EQ(Communicator::cpu_from_environment().size(), 1);
}

}  // namespace
}  // namespace uniep::testing
