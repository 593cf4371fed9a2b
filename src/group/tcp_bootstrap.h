#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "group/bootstrap.h"
#include "group/failure_latch.h"
#include "group/tcp_connection.h"
#include "uniep/error.h"

namespace uniep {

/// What a TcpBootstrap asks while it waits for other ranks, several times a second.
struct TcpWatch {
  std::function<void()> check{};  ///< throws where the wait is to end
  /// Why a rank will not come any more; nothing while it may.
  std::function<std::optional<std::string>(int rank)> end_of{};
};

/// Where the ranks of a group meet.
struct TcpMeeting {
  std::string address;  ///< rank 0's
  int port = 0;
  std::uint64_t group = 0;     ///< a number that tells this group from others that meet there
  tcp::Descriptor listener{};  ///< on rank 0, where it listens there already
  TcpWatch watch{};
};

/// A Bootstrap among processes: every rank has a connection to rank 0, the root, through which all
/// goes. Where a rank fails or its process ends, the root tells all others, so that all throw
/// alike.
///
/// In all_gather the time limit is that of ranks that have not come; parts that are under way may
/// take longer, as long as bytes keep moving.
class TcpBootstrap final : public Bootstrap {
 public:
  /// Collective. Rank 0 listens at the meeting's address and port, or at the first free one of the
  /// 15 ports above where another program holds it; the others look for it there, and know it by
  /// its greeting. Strangers are dropped. Throws Error(kTimeout) where a rank has not come after
  /// `limit_ms`, and Error(kInvalidArgument) on a rank that does not fit into the group.
  TcpBootstrap(int rank, int size, TcpMeeting meeting, int limit_ms);
  TcpBootstrap(int rank, int size, const std::string& address, int port, int limit_ms)
      : TcpBootstrap(rank, size, TcpMeeting{.address = address, .port = port}, limit_ms) {}

  /// Says goodbye, unless an error is on its way: then this rank counts as lost.
  ~TcpBootstrap() override;
  TcpBootstrap(const TcpBootstrap&) = delete;
  TcpBootstrap& operator=(const TcpBootstrap&) = delete;

  std::vector<std::string> all_gather(const std::string& bytes, const char* stage,
                                      int limit_ms) override;
  void check() override;

  /// Instead of the meeting's, from now on.
  void watch(TcpWatch watch) { watch_ = std::move(watch); }

  /// This rank takes no further part, and the others are told why; nothing where the group has
  /// failed already.
  void abandon(const std::string& sentence);

 private:
  using Clock = tcp::Clock;
  using Parts = std::vector<std::string>;
  using Gathered = std::vector<std::optional<std::string>>;

  /// What a collective step is about, for error texts and time limits.
  struct Step {
    const char* stage;
    int limit_ms;
    Clock::time_point begin = Clock::now();

    Clock::duration limit() const { return std::chrono::milliseconds(limit_ms); }
  };

  // Joining.
  void accept_ranks(TcpMeeting meeting, const Step& step);
  void greet_visitors(const TcpMeeting& meeting, std::vector<tcp::Connection>& visitors);
  void admit(tcp::Connection& visitor);
  void join(const TcpMeeting& meeting, const Step& step);
  bool try_root(const TcpMeeting& meeting, int at, Clock::time_point until);

  // The root's part of all_gather.
  Parts gather_as_root(const std::string& bytes, const Step& step);
  Parts collect(const std::string& bytes, const Step& step);
  void deliver(const Parts& parts, const Step& step);
  std::vector<tcp::Connection*> read_members(Gathered* parts);
  void answer(const std::vector<tcp::Connection*>& asking, const Step& step,
              const std::vector<bool>& here);

  // A member's.
  Parts gather_as_member(const std::string& bytes, const Step& step);
  tcp::Frame await(tcp::FrameKind kind, const Step& step);

  /// `tcp::pump`, but returns early so that the watch is asked in time.
  bool pump(const std::vector<tcp::Connection*>& connections, Clock::time_point until,
            int also = -1);

  // Failing. `fail` tells the other ranks as far as they can be reached.
  std::optional<std::string> end_of(int rank) const;
  bool is_gone(int rank, tcp::Connection& connection) const;
  Error missing_error(const Step& step, int peer, int present) const;
  [[noreturn]] void fail(const Error& error, int failed_rank);
  [[noreturn]] void lost(int rank, const std::string& when);
  [[noreturn]] void hear_verdict(const std::string& verdict, const Step* step);
  void tell(tcp::FrameKind kind, const std::string& payload);

  tcp::Connection& root() { return connections_[0]; }
  std::vector<tcp::Connection*> all_connections();

  const int rank_;
  const int size_;
  TcpWatch watch_;
  FailureLatch failure_;
  std::uint64_t round_ = 0;  // all_gathers so far
  /// On rank 0: by rank, the first one unused; elsewhere: the one to rank 0.
  std::vector<tcp::Connection> connections_;
};

/// A port of the loopback interface that nobody listens at now.
int free_tcp_port();

}  // namespace uniep
