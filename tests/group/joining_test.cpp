// Groups that come from callbacks: who fits together, and who does not.
#include "group/joining.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <thread>

#include "support/expect_error.h"
#include "support/process_group.h"

namespace uniep::testing {
namespace {

using Tamper = std::function<void(int rank, GroupOptions& options)>;

std::vector<std::string> said_by(Crew& crew) {
  std::vector<std::string> said;
  for (const Crew::End& end : crew.ends()) said.push_back(end.said);
  return said;
}

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
  return said_by(crew);
}

/// The same on hosts of these names, by rank, which all have the loopback interface in common.
std::vector<std::string> join_on(
    const std::vector<std::string>& hosts, const Tamper& tamper = [](int, GroupOptions&) {}) {
  return join(static_cast<int>(hosts.size()), [&](int rank, GroupOptions& options) {
    setenv("UNIEP_HOST_ID", hosts[static_cast<std::size_t>(rank)].c_str(), 1);
    setenv("UNIEP_SOCKET_IFNAME", "lo", 1);
    tamper(rank, options);
  });
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

/// A callback that is called at most so often.
Tamper calls_at_most(int most) {
  return [most](int, GroupOptions& options) {
    options.all_gather = [most, gather = options.all_gather, calls = 0](auto own,
                                                                        auto all) mutable {
      EXPECT_LE(++calls, most);
      gather(own, all);
    };
  };
}

TEST(JoinGroup, TheCallbackIsCalledOnceAndThenNoMore) {
  expect_all(join(3, calls_at_most(1)), "2");
}

TEST(JoinGroup, OnSeveralHostsTheCallbackIsCalledTwice) {
  expect_all(join_on({"a", "a", "b", "b"}, calls_at_most(2)), "3");
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

TEST(JoinGroup, RanksMustBeOfOneVersion) {
  expect_all(join(2, replaced_on_rank_1("0.1.0")),
             invalid("ranks 0 and 1 differ in the version of uniep; the same on all ranks of a "
                     "group is accepted"));
}

TEST(JoinGroup, HostsAreFoundAndTellRank0sAddress) {
  const std::vector<std::string> names = {"a", "a", "b", "b"};
  const Common<MeetingPlace> place;
  Crew crew(4, [&](int rank) {
    setenv("UNIEP_HOST_ID", names[static_cast<std::size_t>(rank)].c_str(), 1);
    setenv("UNIEP_SOCKET_IFNAME", "lo", 1);
    const GroupMember member = join_group(place->options(rank, 4));
    return cat(member.layout.hosts, " x ", member.layout.local_ranks, " by ", member.root_address);
  });
  expect_all(said_by(crew), "2 x 2 by 127.0.0.1");
}

TEST(JoinGroup, OneHostNeedsNoNetwork) {
  const Common<MeetingPlace> place;
  Crew crew(2, [&](int rank) {
    setenv("UNIEP_HOSTS", "2", 1);
    setenv("UNIEP_SOCKET_IFNAME", "nothing is asked of it", 1);
    const GroupMember member = join_group(place->options(rank, 2));
    return cat(member.layout.hosts, " hosts", member.root_address);
  });
  expect_all(said_by(crew), "2 hosts");
}

void expect_alike(const std::vector<std::string>& said, const std::vector<std::string>& words) {
  expect_all(said, said[0]);
  for (const std::string& word : words) {
    EXPECT_NE(said[0].find(word), std::string::npos) << word << " is not in: " << said[0];
  }
}

TEST(JoinGroup, HostsThatMakeNoRailsAreRefusedAlike) {
  expect_alike(join_on({"a", "a", "b"}), {"error 0", "2 ranks", "1 on host 1"});
  expect_alike(join_on({"a", "b", "a", "b"}), {"error 0", "ranks 0 and 2", "rank 1"});
}

TEST(JoinGroup, GpusOfSeveralHostsAreRefusedAlike) {
  expect_alike(join_on({"a", "b"}, [](int, GroupOptions& o) { o.backend = Backend::kCuda; }),
               {"error 1", "2 hosts", "CUDA"});
}

TEST(JoinGroup, AnAddressThatRank0DoesNotFindIsRefusedAlike) {
  expect_alike(
      join_on({"a", "b"}, [](int, GroupOptions&) { setenv("UNIEP_SOCKET_IFNAME", "none7", 1); }),
      {"error 0", "rank 0", "UNIEP_SOCKET_IFNAME", "'none7'", "lo"});
  expect_alike(join_on({"a", "b"},
                       [](int rank, GroupOptions&) {
                         if (rank == 1) setenv("UNIEP_HOST_ID", std::string(64, 'x').c_str(), 1);
                       }),
               {"error 0", "rank 1", "UNIEP_HOST_ID", "64"});
}

/// Two groups of two hosts each, whose callbacks tell ranks 1 of the other group's rank 0.
TEST(JoinGroup, ARankOfAnotherGroupIsNotLetIn) {
  struct Meeting {
    MeetingPlace place;
    MeetingPlace doors;  // all four, where rank 0 of each group is to be found
  };
  const Common<std::array<Meeting, 2>> groups;
  Crew crew(4, [&](int process) {
    const int rank = process / 2;
    Meeting& mine = (*groups)[static_cast<std::size_t>(process % 2)];
    setenv("UNIEP_HOST_ID", cat(rank).c_str(), 1);
    setenv("UNIEP_SOCKET_IFNAME", "lo", 1);
    GroupOptions options = mine.place.options(rank, 2);
    options.timeout_ms = 1500;
    options.all_gather = [&, gather = options.all_gather, calls = 0](auto own, auto all) mutable {
      if (calls++ == 0) return gather(own, all);
      std::vector<std::byte> everybody(4 * own.size());
      (*groups)[0].doors.all_gather(process, 4, own, everybody);
      const auto other = static_cast<std::ptrdiff_t>(own.size()) * ((process + rank) % 2);
      std::copy_n(everybody.begin() + other, own.size(), all.begin());
    };
    return cat("joined as ", join_group(options).rank);
  });
  for (const std::string& sentence : said_by(crew)) {
    EXPECT_NE(sentence.find("1500 ms"), std::string::npos) << sentence;
  }
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

/// As a launcher would set it for two ranks.
void join_environment(int rank, int port) {
  setenv("RANK", cat(rank).c_str(), 1);
  setenv("WORLD_SIZE", "2", 1);
  setenv("LOCAL_RANK", cat(rank).c_str(), 1);
  setenv("MASTER_ADDR", "127.0.0.1", 1);
  setenv("MASTER_PORT", cat(port).c_str(), 1);
}

/// What is wrong with the environment of one rank, the others hear of at once.
TEST(JoinGroup, ARankWithAWrongEnvironmentTellsTheOthers) {
  for (const auto& [name, value] :
       {std::pair("UNIEP_TIMEOUT_MS", "soon"), std::pair("UNIEP_HOSTS", "some")}) {
    const int port = free_tcp_port();
    Crew crew(2, [&](int rank) {
      if (rank == 1) setenv(name, value, 1);
      join_environment(rank, port);
      try {
        (void)Communicator::cpu_from_environment();
      } catch (const Error& e) {
        return std::string(e.what());
      }
      return std::string("joined");
    });
    for (const Crew::End& end : crew.ends()) {
      EXPECT_NE(end.said.find(name), std::string::npos) << end.said;
      EXPECT_NE(end.said.find(value), std::string::npos) << end.said;
    }
  }
}

TEST(JoinGroup, TheEnvironmentIsAnotherSource) {
  const int port = free_tcp_port();
  Crew crew(2, [&](int rank) {
    join_environment(rank, port);
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
