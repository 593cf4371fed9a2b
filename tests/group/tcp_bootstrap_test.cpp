// Ranks are processes here, as they are in use: a test starts them by fork.
#include "group/tcp_bootstrap.h"

#include <netinet/in.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <functional>
#include <string_view>
#include <thread>
#include <utility>

#include "group/tcp_connection.h"
#include "group/tcp_socket.h"
#include "support/expect_error.h"
#include "support/forked_ranks.h"

namespace uniep::testing {
namespace {

using std::chrono::milliseconds;

constexpr int kLimit = 20000;
constexpr int kShort = 1500;
constexpr int kProtocol = 2;

std::string timeout(int rank, const char* stage, int peer, int expected, int seen, int limit) {
  return cat("error ", static_cast<int>(ErrorCode::kTimeout), ": rank ", rank,
             ": wait expired after ", limit, " ms (timeout_ms or UNIEP_TIMEOUT_MS) in stage ",
             stage, ", peer ", peer, ": expected ", expected, " ranks present, seen ", seen);
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
  const ProcessEvent gave_up;
  const auto said = group(3, [&](TcpBootstrap& bootstrap, int rank) {
    if (rank == 0) gave_up.wait(2);
    const std::string error = thrown_by([&] { bootstrap.all_gather("", "enter", kShort); });
    gave_up.tell();
    return error;
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

TEST(TcpBootstrap, WhereRankZeroHasNoDescriptorsItSaysSo) {
  const auto said = forked_ranks(2, [port = free_tcp_port()](int rank) {
    if (rank == 0) {
      // One more than there are: the listening socket's.
      const int next = dup(STDOUT_FILENO);
      close(next);
      const rlimit limit{static_cast<rlim_t>(next) + 1, static_cast<rlim_t>(next) + 1};
      EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
    }
    return thrown_by(
        [&] { TcpBootstrap(rank, 2, "127.0.0.1", port, rank == 0 ? kLimit : kShort); });
  });
  EXPECT_NE(said[0].find("ulimit -n"), std::string::npos) << said[0];
  EXPECT_NE(said[1], "nothing");
}

TEST(TcpBootstrap, ARankOfAnotherWorldSizeIsTurnedAway) {
  const int port = free_tcp_port();
  const ProcessEvent refused;
  const auto said = forked_ranks(3, [&](int process) {
    if (process == 2) {
      const std::string error = thrown_by([&] { TcpBootstrap(1, 3, "127.0.0.1", port, kLimit); });
      refused.tell();
      return error;
    }
    if (process == 1) refused.wait();  // until then nobody else is there
    const TcpBootstrap bootstrap(process, 2, "127.0.0.1", port, kLimit);
    return std::string("joined");
  });
  EXPECT_EQ(said[0], "joined");
  EXPECT_EQ(said[1], "joined");
  EXPECT_STATES(said[2], cat("error ", static_cast<int>(ErrorCode::kInvalidArgument),
                             ": WORLD_SIZE is 3 on rank 1 and 2 on rank 0 at 127.0.0.1:", port,
                             "; the same on all ranks is accepted"));
}

// ---- Members that are played by hand, frame by frame

std::string hello_of(int protocol, int size, int rank) {
  const std::int32_t hello[] = {protocol, size, rank};
  return {reinterpret_cast<const char*>(hello), sizeof hello};
}

bool pump_until(tcp::Connection& c, const std::function<bool()>& done) {
  const auto until = Deadline::in(milliseconds(kLimit));
  while (!done() && !c.ended() && !until.expired()) tcp::pump({&c}, until);
  return done();
}

/// Connects to the root, hears its greeting and says `hello`.
tcp::Connection come_by_hand(int port, tcp::FrameKind kind, const std::string& hello) {
  const auto until = Deadline::in(milliseconds(kLimit));
  tcp::Connection c;
  while (!c.open() && !until.expired()) {
    c = tcp::Connection(tcp::connect_to("127.0.0.1", port, Deadline::in(milliseconds(10))));
  }
  EXPECT_TRUE(pump_until(c, [&] { return !c.received().empty(); })) << "no greeting";
  c.received().clear();
  c.trust();
  c.send(kind, hello);
  EXPECT_TRUE(pump_until(c, [&] { return !c.sending(); })) << "the hello was not sent";
  return c;
}

TEST(TcpBootstrap, ARankThatIsThereAlreadyIsRefused) {
  const int port = free_tcp_port();
  const ProcessEvent came, refused;
  const auto said = forked_ranks(4, [&](int process) {
    if (process == 1) {
      tcp::Connection c = come_by_hand(port, tcp::FrameKind::kHello, hello_of(kProtocol, 3, 1));
      came.tell();
      const bool welcome = pump_until(c, [&] { return !c.received().empty(); });
      return std::string(welcome ? "joined" : "dropped");
    }
    if (process == 2) refused.wait();  // until then the group is not complete
    if (process == 3) {
      came.wait();
      const std::string error = thrown_by([&] { TcpBootstrap(1, 3, "127.0.0.1", port, kLimit); });
      refused.tell();
      return error;
    }
    const TcpBootstrap bootstrap(process, 3, "127.0.0.1", port, kLimit);
    return std::string("joined");
  });
  for (const std::size_t rank : {0u, 1u, 2u}) EXPECT_EQ(said[rank], "joined") << rank;
  EXPECT_STATES(said[3],
                cat("error ", static_cast<int>(ErrorCode::kInvalidArgument),
                    ": rank 1 has joined the group already; each RANK from 0 to 2 is accepted "
                    "once"));
}

TEST(TcpBootstrap, WhoSaysWhatNoRankSaysIsDropped) {
  const int port = free_tcp_port();
  using tcp::FrameKind;
  const std::pair<FrameKind, std::string> wrong[] = {
      {FrameKind::kHello, hello_of(kProtocol, 3, -1)},
      {FrameKind::kHello, hello_of(kProtocol, 3, 0)},
      {FrameKind::kHello, hello_of(kProtocol, 3, 3)},
      {FrameKind::kHello, hello_of(kProtocol, 4, 2)},
      {FrameKind::kHello, hello_of(kProtocol + 1, 3, 2)},
      {FrameKind::kPart, hello_of(kProtocol, 3, 2)},
      {FrameKind::kHello, ""},
      {FrameKind::kHello,
       hello_of(kProtocol, 3, 2) + std::string(5000, ' ')}};  // more than a stranger may
  const int strangers = static_cast<int>(std::size(wrong));
  const ProcessEvent dropped;
  const auto said = forked_ranks(3 + strangers, [&](int process) {
    if (process >= 3) {
      const auto& [kind, hello] = wrong[process - 3];
      tcp::Connection c = come_by_hand(port, kind, hello);
      pump_until(c, [&] { return c.ended() || !c.received().empty(); });
      dropped.tell();
      return std::string(c.ended() && c.received().empty() ? "dropped" : "not dropped");
    }
    if (process == 2) dropped.wait(strangers);  // until then the group is not complete
    TcpBootstrap bootstrap(process, 3, "127.0.0.1", port, kLimit);
    return bootstrap.all_gather(cat(process), "plan", kLimit)[2];
  });
  for (int r = 0; r < 3; ++r) EXPECT_EQ(said[static_cast<std::size_t>(r)], "2");
  for (int i = 0; i < strangers; ++i) {
    EXPECT_EQ(said[static_cast<std::size_t>(3 + i)], "dropped") << "stranger " << i;
  }
}

/// The bytes of a frame whose payload is zeros.
std::string frame_of(tcp::FrameKind kind, std::uint64_t payload_bytes) {
  const std::uint32_t words[] = {0x316e7565, static_cast<std::uint32_t>(kind)};  // magic, kind
  std::string frame(sizeof words + sizeof payload_bytes + payload_bytes, '\0');
  std::memcpy(frame.data(), words, sizeof words);
  std::memcpy(frame.data() + sizeof words, &payload_bytes, sizeof payload_bytes);
  return frame;
}

/// How many of the bytes could be sent.
std::size_t sent_bytes(int fd, std::string_view bytes) {
  pollfd writable{.fd = fd, .events = POLLOUT, .revents = 0};
  ::poll(&writable, 1, kLimit);
  const ssize_t sent = ::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
  return sent > 0 ? static_cast<std::size_t>(sent) : 0;
}

/// All in all for twice the time limit, but never for as long as that without a byte.
TEST(TcpBootstrap, APartMayTakeLongerAsLongAsItComes) {
  constexpr int kStepMs = 50;
  constexpr int kLimitMs = 20 * kStepMs;
  constexpr std::size_t kBytes = std::size_t{16} << 20;
  const int port = free_tcp_port();
  const auto said = forked_ranks(3, [&](int rank) {
    if (rank != 1) {
      TcpBootstrap bootstrap(rank, 3, "127.0.0.1", port, kLimit);
      return cat(bootstrap.all_gather("", "plan", kLimitMs)[1].size());
    }
    tcp::Connection c = come_by_hand(port, tcp::FrameKind::kHello, hello_of(kProtocol, 3, 1));
    EXPECT_TRUE(pump_until(c, [&] { return !c.received().empty(); })) << "no welcome";
    c.received().clear();
    // The header at once, then the payload by and by.
    const std::string frame = frame_of(tcp::FrameKind::kPart, kBytes);
    const std::size_t piece = frame.size() / (2 * kLimitMs / kStepMs) + 1;
    for (std::size_t at = 0; at < frame.size(); sleep_ms(kStepMs)) {
      const std::size_t sent = sent_bytes(c.fd(), std::string_view(frame).substr(at, piece));
      if (sent == 0) return std::string("the root has closed the connection");
      at += sent;
    }
    EXPECT_TRUE(pump_until(c, [&] { return !c.received().empty(); })) << "no result";
    return cat(kBytes);
  });
  EXPECT_EQ(said, std::vector<std::string>(3, cat(kBytes)));
}

/// Reads `bytes` in as many pieces, with a pause before each; returns how many came.
std::size_t read_slowly(int fd, std::size_t bytes, std::size_t pieces, int pause_ms) {
  std::string buffer(bytes / pieces + 1, '\0');
  std::size_t at = 0;
  while (at < bytes) {
    sleep_ms(pause_ms);
    pollfd readable{.fd = fd, .events = POLLIN, .revents = 0};
    ::poll(&readable, 1, kLimit);
    const ssize_t received = ::recv(fd, buffer.data(), std::min(buffer.size(), bytes - at), 0);
    if (received <= 0) break;
    at += static_cast<std::size_t>(received);
  }
  return at;
}

/// All in all for twice the time limit, as above.
TEST(TcpBootstrap, AResultMayBeReadForLongerAsLongAsItIsRead) {
  constexpr int kStepMs = 50;
  constexpr int kLimitMs = 20 * kStepMs;
  constexpr std::size_t kBytes = std::size_t{32} << 20;
  const int port = free_tcp_port();
  const auto said = forked_ranks(3, [&](int rank) {
    if (rank != 1) {
      TcpBootstrap bootstrap(rank, 3, "127.0.0.1", port, kLimit);
      const std::string part(rank == 2 ? kBytes : 0, 'x');
      return cat(bootstrap.all_gather(part, "plan", kLimitMs)[2].size());
    }
    tcp::Connection c = come_by_hand(port, tcp::FrameKind::kHello, hello_of(kProtocol, 3, 1));
    EXPECT_TRUE(pump_until(c, [&] { return !c.received().empty(); })) << "no welcome";
    c.send(tcp::FrameKind::kPart);
    while (c.write_some()) {
    }
    const std::size_t header_and_sizes = frame_of(tcp::FrameKind::kResult, 3 * 8).size();
    const std::size_t read =
        read_slowly(c.fd(), header_and_sizes + kBytes, 2 * kLimitMs / kStepMs, kStepMs);
    return cat(read - header_and_sizes);
  });
  EXPECT_EQ(said, std::vector<std::string>(3, cat(kBytes)));
}

/// A listening socket at `port`, as another program would hold it: it never accepts.
Descriptor occupy(int port) { return tcp::listen_at("127.0.0.1", port); }

/// A socket that is bound to `port` of this host, or none where somebody else has the port.
Descriptor bind_loopback(int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<std::uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  Descriptor socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const bool bound =
      ::bind(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) == 0;
  return bound ? std::move(socket) : Descriptor();
}

struct HeldPorts {
  int first = 0;
  std::vector<Descriptor> sockets;
};

/// Holds `count` ports in a row, with a free one behind them. They lie below the ports that
/// connections are given: of those any may belong to a program beside this one, and be let go of
/// while a test runs.
HeldPorts hold_ports(int count) {
  constexpr int kLowest = 20000, kEnd = 32768;
  const int runs = (kEnd - kLowest) / (count + 1);
  for (int i = 0; i < runs; ++i) {
    HeldPorts held{kLowest + (::getpid() + i) % runs * (count + 1), {}};
    for (int port = held.first; port < held.first + count; ++port) {
      held.sockets.push_back(bind_loopback(port));
    }
    const bool all = std::all_of(held.sockets.begin(), held.sockets.end(),
                                 [](const Descriptor& socket) { return socket.valid(); });
    if (all && bind_loopback(held.first + count).valid()) return held;
  }
  throw std::runtime_error(cat("no ", count, " ports in a row are free"));
}

TEST(TcpBootstrap, TheRootTriesFifteenMorePorts) {
  const HeldPorts held = hold_ports(15);
  const auto said = forked_ranks(2, [&](int rank) {
    TcpBootstrap bootstrap(rank, 2, "127.0.0.1", held.first, kLimit);
    return bootstrap.all_gather(cat(rank), "plan", kLimit)[1];
  });
  EXPECT_EQ(said, std::vector<std::string>(2, "1"));
}

TEST(TcpBootstrap, SixteenPortsThatAreTakenAreAnError) {
  const HeldPorts held = hold_ports(16);
  expect_invalid(cat("rank 0 cannot listen: the ports ", held.first, " to ", held.first + 15,
                     " of MASTER_ADDR 127.0.0.1 are all taken; a MASTER_PORT that is free is "
                     "accepted"),
                 [&] { TcpBootstrap(0, 2, "127.0.0.1", held.first, kLimit); });
}

TEST(TcpBootstrap, GroupsThatMoveOnToNeighbouringPortsStayApart) {
  const int port = free_tcp_port();
  const Descriptor held = occupy(port);
  ASSERT_TRUE(held.valid());
  const auto said = forked_ranks(4, [&](int process) {
    const int group = process / 2;  // begins at the port at which the one before may end up
    TcpBootstrap bootstrap(process % 2, 2, "127.0.0.1", port + group, kLimit);
    const auto all = bootstrap.all_gather(cat(group), "plan", kLimit);
    return all[0] + all[1];
  });
  EXPECT_EQ(said, (std::vector<std::string>{"00", "00", "11", "11"}));
}

TEST(TcpBootstrap, TheRootMovesOnFromAPortThatIsTaken) {
  const int port = free_tcp_port();
  const Descriptor held = occupy(port);
  ASSERT_TRUE(held.valid());
  const auto said = forked_ranks(3, [&](int rank) {
    TcpBootstrap bootstrap(rank, 3, "127.0.0.1", port, kLimit);
    return bootstrap.all_gather(cat(rank), "plan", kLimit)[2];
  });
  EXPECT_EQ(said, std::vector<std::string>(3, "2"));
}

/// A root that admits one member and sends it a refusal where a result is due.
void confused_root(int port) {
  const Descriptor listener = tcp::listen_at("127.0.0.1", port);
  const auto until = Deadline::in(milliseconds(kLimit));
  Descriptor visitor;
  while (!visitor.valid() && !until.expired()) visitor = tcp::accept_from(listener);
  tcp::Connection member(std::move(visitor));
  const std::int32_t greeting[] = {2, 2, port, 0, 0, 0};  // protocol, size, port, -, group
  member.send(tcp::FrameKind::kGreeting,
              std::string(reinterpret_cast<const char*>(greeting), sizeof greeting));
  member.send(tcp::FrameKind::kWelcome);
  member.send(tcp::FrameKind::kRefused, "no more");
  while (!member.ended() && !until.expired()) tcp::pump({&member}, until);
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
  EXPECT_STATES(said[1], cat("error ", static_cast<int>(ErrorCode::kInvalidArgument),
                             ": no more; error ", static_cast<int>(ErrorCode::kPeerFailed),
                             ": the group is unusable since rank 1 failed: no more"));
}

/// Talks, but not our language, and stays until it is dropped; `talked` is called in between.
template <class Talked>
std::string be_a_stranger(int port, Talked&& talked) {
  const auto until = Deadline::in(milliseconds(kLimit));
  Descriptor fd;
  while (!fd.valid() && !until.expired()) {
    fd = tcp::connect_to("127.0.0.1", port, Deadline::in(milliseconds(10)));
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
  const ProcessEvent talked;
  const auto said = forked_ranks(4, [&](int rank) {
    if (rank == 3) return be_a_stranger(port, [&] { talked.tell(); });
    if (rank == 2) talked.wait();  // so that the others still wait when the stranger comes
    TcpBootstrap bootstrap(rank, 3, "127.0.0.1", port, kLimit);
    return bootstrap.all_gather(cat(rank), "plan", kLimit)[2];
  });
  EXPECT_EQ(said, (std::vector<std::string>{"2", "2", "2", "dropped"}));
}

}  // namespace
}  // namespace uniep::testing
