// Ranks are processes here, as they are in use: a test starts them by fork.
#include "comm/tcp_bootstrap.h"

#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <thread>

#include "support/expect_error.h"
#include "support/forked_ranks.h"

namespace uniep::testing {
namespace {

using std::chrono::milliseconds;

constexpr int kLimit = 20000;
constexpr int kShort = 400;

std::string timeout(int rank, const char* stage, int peer, int expected, int seen, int limit) {
  return cat("error ", static_cast<int>(ErrorCode::kTimeout), ": rank ", rank,
             ": wait expired after ", limit, " ms (UNIEP_TIMEOUT_MS) in stage ", stage, ", peer ",
             peer, ": expected ", expected, " ranks present, seen ", seen);
}

std::string gone(int rank, const char* stage) {
  return cat("error ", static_cast<int>(ErrorCode::kPeerFailed), ": rank ", rank,
             " is gone: its process ended or closed its connection in stage ", stage);
}

void sleep_ms(int ms) { std::this_thread::sleep_for(milliseconds(ms)); }

/// What a call throws, as forked_ranks would print it; "nothing" where it does not throw.
template <class Call>
std::string thrown_by(Call&& call) {
  try {
    call();
    return "nothing";
  } catch (const Error& e) {
    return cat("error ", static_cast<int>(e.code()), ": ", e.what());
  }
}

/// Bytes that differ by rank and round.
std::string payload(int rank, int round, std::size_t bytes) {
  std::string text(bytes, '\0');
  for (std::size_t i = 0; i < bytes; ++i) {
    text[i] = static_cast<char>(i * 31 + static_cast<std::size_t>(rank * 7 + round));
  }
  return text;
}

using Body = std::function<std::string(TcpBootstrap&, int rank)>;

std::vector<std::string> group(int size, const Body& body, int limit_ms = kLimit) {
  const int port = free_tcp_port();
  return forked_ranks(size, [&](int rank) {
    TcpBootstrap bootstrap(rank, size, "127.0.0.1", port, limit_ms);
    return body(bootstrap, rank);
  });
}

TEST(TcpBootstrap, AGroupOfOneNeedsNoNetwork) {
  TcpBootstrap alone(0, 1, "no such host", 1, 1);
  EXPECT_EQ(alone.all_gather("abc", "plan", 1), std::vector<std::string>{"abc"});
  alone.check();
}

class TcpGroups : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Sizes, TcpGroups, ::testing::Range(2, 9));

TEST_P(TcpGroups, GatherPartsOfUnevenSizesInManyRounds) {
  const int size = GetParam();
  const auto bytes = [](int rank, int round) {
    return static_cast<std::size_t>((rank * 1237 + round * 911) % 5000 * (round % 3));
  };
  const auto said = group(size, [&](TcpBootstrap& bootstrap, int rank) {
    for (int round = 0; round < 20; ++round) {
      const auto all =
          bootstrap.all_gather(payload(rank, round, bytes(rank, round)), "plan", kLimit);
      for (int r = 0; r < size; ++r) {
        if (all.at(static_cast<std::size_t>(r)) != payload(r, round, bytes(r, round))) {
          return cat("wrong part of rank ", r, " in round ", round);
        }
      }
    }
    return std::string("right");
  });
  EXPECT_EQ(said, std::vector<std::string>(static_cast<std::size_t>(size), "right"));
}

TEST(TcpBootstrap, AThousandRounds) {
  const auto said = group(4, [](TcpBootstrap& bootstrap, int rank) {
    for (int round = 0; round < 1000; ++round) {
      const auto all = bootstrap.all_gather(cat(rank, ":", round), "plan", kLimit);
      if (all[3] != cat("3:", round)) return cat("round ", round, " gave ", all[3]);
      bootstrap.check();
    }
    return std::string("right");
  });
  EXPECT_EQ(said, std::vector<std::string>(4, "right"));
}

TEST(TcpBootstrap, PartsOfManyMegabytes) {
  constexpr std::size_t kBytes[] = {10 << 20, 0, 1, 24 << 20};
  const auto said = group(4, [&](TcpBootstrap& bootstrap, int rank) {
    const auto all = bootstrap.all_gather(payload(rank, 1, kBytes[rank]), "plan", kLimit);
    for (int r = 0; r < 4; ++r) {
      if (all[static_cast<std::size_t>(r)] != payload(r, 1, kBytes[r])) return cat("wrong: ", r);
    }
    return std::string("right");
  });
  EXPECT_EQ(said, std::vector<std::string>(4, "right"));
}

TEST(TcpBootstrap, EveryRankNamesTheOneThatDoesNotCome) {
  const auto said = group(4, [](TcpBootstrap& bootstrap, int rank) {
    bootstrap.all_gather("", "plan", kLimit);
    if (rank == 2) {
      sleep_ms(kShort + 400);
      return thrown_by([&] { bootstrap.all_gather("late", "enter", kShort); });
    }
    if (rank == 0) sleep_ms(50);  // so that others' limits pass first
    const std::string error = thrown_by([&] { bootstrap.all_gather("", "enter", kShort); });
    const std::string again = thrown_by([&] { bootstrap.all_gather("", "enter", kShort); });
    EXPECT_NE(again.find("the group is unusable since rank"), std::string::npos) << again;
    EXPECT_EQ(again, thrown_by([&] { bootstrap.check(); }));
    return error;
  });
  for (const int r : {0, 1, 3}) {
    EXPECT_EQ(said[static_cast<std::size_t>(r)], timeout(r, "enter", 2, 4, 3, kShort));
  }
  EXPECT_NE(said[2].find("the group is unusable"), std::string::npos) << said[2];
}

TEST(TcpBootstrap, TheRootIsNamedWhereItDoesNotCome) {
  const auto said = group(3, [](TcpBootstrap& bootstrap, int rank) {
    if (rank == 0) sleep_ms(kShort + 800);
    return thrown_by([&] { bootstrap.all_gather("", "enter", kShort); });
  });
  EXPECT_EQ(said[1], timeout(1, "enter", 0, 3, 1, kShort));
  EXPECT_EQ(said[2], timeout(2, "enter", 0, 3, 1, kShort));
  EXPECT_NE(said[0].find("the group is unusable: rank "), std::string::npos) << said[0];
}

class KilledRank : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, KilledRank, ::testing::Values(0, 2));

TEST_P(KilledRank, EndsAllOthersAtOnce) {
  const int victim = GetParam();
  const auto begin = std::chrono::steady_clock::now();
  const auto said = group(4, [&](TcpBootstrap& bootstrap, int rank) {
    bootstrap.all_gather("", "plan", kLimit);
    if (rank == victim) {
      sleep_ms(100);
      raise(SIGKILL);
    }
    return thrown_by([&] { bootstrap.all_gather("", "enter", kLimit); });
  });
  EXPECT_LT(std::chrono::steady_clock::now() - begin, milliseconds(kLimit / 2));
  for (int r = 0; r < 4; ++r) {
    EXPECT_EQ(said[static_cast<std::size_t>(r)],
              r == victim ? cat("signal ", SIGKILL) : gone(victim, "enter"));
  }
}

TEST_P(KilledRank, IsNoticedByARankThatChecks) {
  const int victim = GetParam();
  const auto said = group(3, [&](TcpBootstrap& bootstrap, int rank) {
    bootstrap.all_gather("", "plan", kLimit);
    if (rank == victim) raise(SIGKILL);
    return thrown_by([&] {
      for (int i = 0; i < kLimit; ++i) {
        bootstrap.check();
        sleep_ms(1);
      }
    });
  });
  for (int r = 0; r < 3; ++r) {
    if (r == victim) continue;
    EXPECT_NE(said[static_cast<std::size_t>(r)].find(cat("rank ", victim, " is gone")),
              std::string::npos)
        << said[static_cast<std::size_t>(r)];
  }
}

TEST(TcpBootstrap, ARankThatIsDoneIsNotLost) {
  const auto said = group(3, [](TcpBootstrap& bootstrap, int rank) {
    bootstrap.all_gather("", "plan", kLimit);
    if (rank == 1) return std::string("nothing");
    sleep_ms(200);
    return thrown_by([&] { bootstrap.check(); });
  });
  EXPECT_EQ(said, std::vector<std::string>(3, "nothing"));
}

TEST(TcpBootstrap, ARankThatThrowsIsLost) {
  const auto said = forked_ranks(2, [port = free_tcp_port()](int rank) -> std::string {
    TcpBootstrap bootstrap(rank, 2, "127.0.0.1", port, kLimit);
    if (rank == 1) throw Error(ErrorCode::kIo, "mine");
    return thrown_by([&] {
      for (int i = 0; i < kLimit; ++i, sleep_ms(1)) bootstrap.check();
    });
  });
  EXPECT_NE(said[0].find("rank 1 is gone"), std::string::npos) << said[0];
}

TEST(TcpBootstrap, ARankThatNeverStartsIsNamedByAll) {
  const int port = free_tcp_port();
  const auto said = forked_ranks(4, [&](int rank) {
    if (rank == 1) return std::string("stays away");
    if (rank == 0) sleep_ms(20);
    const TcpBootstrap bootstrap(rank, 4, "127.0.0.1", port, kShort);
    return std::string("joined");
  });
  for (const int r : {0, 2, 3}) {
    EXPECT_EQ(said[static_cast<std::size_t>(r)], timeout(r, "connect", 1, 4, 3, kShort));
  }
}

TEST(TcpBootstrap, NobodyListens) {
  const int port = free_tcp_port();
  EXPECT_EQ(thrown_by([&] { TcpBootstrap(1, 2, "127.0.0.1", port, 100); }),
            timeout(1, "connect", 0, 2, 1, 100));
  const std::string unknown = thrown_by([&] { TcpBootstrap(1, 2, "no such host", port, kLimit); });
  EXPECT_NE(unknown.find("MASTER_ADDR is 'no such host'"), std::string::npos) << unknown;
}

TEST(TcpBootstrap, ARankOfAnotherWorldSizeIsTurnedAway) {
  const int port = free_tcp_port();
  const auto said = forked_ranks(3, [&](int rank) {
    const TcpBootstrap bootstrap(rank == 2 ? 1 : rank, rank == 2 ? 3 : 2, "127.0.0.1", port,
                                 kLimit);
    return std::string("joined");
  });
  EXPECT_EQ(said[0], "joined");
  EXPECT_EQ(said[1], "joined");
  // It may also come when the group is complete and nobody listens; not in this short a time.
  EXPECT_NE(said[2], "joined");
}

TEST(TcpBootstrap, ARankThatIsThereAlreadyIsRefused) {
  const int port = free_tcp_port();
  const auto said = forked_ranks(4, [&](int process) {
    const int rank = process == 3 ? 1 : process;
    if (process == 3) sleep_ms(100);
    if (process == 2) sleep_ms(300);
    const TcpBootstrap bootstrap(rank, 3, "127.0.0.1", port, kLimit);
    return std::string("joined");
  });
  EXPECT_EQ(said[2], "joined");
  EXPECT_EQ(said[3], cat("error ", static_cast<int>(ErrorCode::kInvalidArgument),
                         ": rank 1 has joined the group already; each RANK from 0 to 2 is accepted "
                         "once"));
}

/// A listening socket at `port`, as another program would hold it: it never accepts.
tcp::Descriptor occupy(int port) { return tcp::listen_at("127.0.0.1", port); }

TEST(TcpBootstrap, TheRootMovesOnFromAPortThatIsTaken) {
  const int port = free_tcp_port();
  const tcp::Descriptor held = occupy(port);
  ASSERT_TRUE(held.valid());
  const auto said = forked_ranks(3, [&](int rank) {
    TcpBootstrap bootstrap(rank, 3, "127.0.0.1", port, kLimit);
    return bootstrap.all_gather(cat(rank), "plan", kLimit)[2];
  });
  EXPECT_EQ(said, std::vector<std::string>(3, "2"));
}

/// A root that admits one member and sends it a refusal where a result is due.
void confused_root(int port) {
  const tcp::Descriptor listener = tcp::listen_at("127.0.0.1", port);
  const auto until = tcp::Clock::now() + milliseconds(kLimit);
  tcp::Descriptor visitor;
  while (!visitor.valid() && tcp::Clock::now() < until) visitor = tcp::accept_from(listener);
  tcp::Connection member(std::move(visitor));
  const std::int32_t greeting[] = {1, 2, port};  // protocol, size, port
  member.send(tcp::FrameKind::kGreeting,
              std::string(reinterpret_cast<const char*>(greeting), sizeof greeting));
  member.send(tcp::FrameKind::kWelcome);
  member.send(tcp::FrameKind::kRefused, "no more");
  while (!member.ended() && tcp::Clock::now() < until) tcp::pump({&member}, until);
}

TEST(TcpBootstrap, IsUnusableAfterAnyErrorInAGather) {
  const int port = free_tcp_port();
  const auto said = forked_ranks(2, [&](int rank) {
    if (rank == 0) {
      confused_root(port);
      return std::string();
    }
    TcpBootstrap bootstrap(rank, 2, "127.0.0.1", port, kLimit);
    const auto gather = [&] { bootstrap.all_gather(std::string(1 << 24, 'x'), "plan", kLimit); };
    const std::string first = thrown_by(gather);
    return cat(first, "; ", thrown_by(gather));
  });
  EXPECT_EQ(said[1], cat("error ", static_cast<int>(ErrorCode::kInvalidArgument),
                         ": no more; error ", static_cast<int>(ErrorCode::kPeerFailed),
                         ": the group is unusable since rank 1 failed: no more"));
}

/// Talks, but not our language, and stays until it is dropped; `talked` is called in between.
template <class Talked>
std::string be_a_stranger(int port, Talked&& talked) {
  const auto until = tcp::Clock::now() + milliseconds(kLimit);
  tcp::Descriptor fd;
  while (!fd.valid() && tcp::Clock::now() < until) {
    fd = tcp::connect_to("127.0.0.1", port, tcp::Clock::now() + milliseconds(10));
  }
  const std::string request = "GET / HTTP/1.1\r\nHost: here\r\n\r\n";
  const bool sent = ::send(fd.get(), request.data(), request.size(), MSG_NOSIGNAL) > 0;
  talked();
  pollfd readable{.fd = fd.get(), .events = POLLIN, .revents = 0};
  char byte = 0;
  ssize_t received = 1;
  while (received > 0 && ::poll(&readable, 1, kLimit) > 0) {
    received = ::recv(fd.get(), &byte, 1, 0);
  }
  const bool closed = received == 0 || (received < 0 && errno == ECONNRESET);
  return sent && closed ? "dropped" : "not dropped";
}

TEST(TcpBootstrap, StrangersAreDropped) {
  const int port = free_tcp_port();
  int talked[2];
  ASSERT_EQ(::pipe(talked), 0);
  const auto said = forked_ranks(4, [&](int rank) {
    char byte = 0;
    if (rank == 3) {
      return be_a_stranger(port, [&] { EXPECT_EQ(::write(talked[1], &byte, 1), 1); });
    }
    // So that the others still wait when the stranger comes.
    if (rank == 2) {
      EXPECT_EQ(::read(talked[0], &byte, 1), 1);
    }
    TcpBootstrap bootstrap(rank, 3, "127.0.0.1", port, kLimit);
    return bootstrap.all_gather(cat(rank), "plan", kLimit)[2];
  });
  EXPECT_EQ(said, (std::vector<std::string>{"2", "2", "2", "dropped"}));
  ::close(talked[0]);
  ::close(talked[1]);
}

}  // namespace
}  // namespace uniep::testing
