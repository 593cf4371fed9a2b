#pragma once

#include <optional>
#include <string>
#include <vector>

#include "comm/bootstrap.h"
#include "comm/failure.h"
#include "comm/tcp_connection.h"
#include "uniep/error.h"

namespace uniep {

/// A Bootstrap among processes: every rank has a connection to rank 0, the root, through which all
/// goes. Where a rank fails or its process ends, the root tells all others, so that all throw
/// alike.
///
/// In all_gather the time limit is that of ranks that have not come; parts that are under way may
/// take longer, as long as bytes keep moving.
class TcpBootstrap final : public Bootstrap {
 public:
  /// Collective. Rank 0 listens at `address`:`port`, or at the first free one of the 15 ports above
  /// where another program holds it; the others look for it there, and know it by its greeting.
  /// Strangers are dropped. Throws Error(kTimeout) where a rank has not come after `limit_ms`, and
  /// Error(kInvalidArgument) on a rank that does not fit into the group.
  TcpBootstrap(int rank, int size, const std::string& address, int port, int limit_ms);

  /// Says goodbye, unless an error is on its way: then this rank counts as lost.
  ~TcpBootstrap() override;
  TcpBootstrap(const TcpBootstrap&) = delete;
  TcpBootstrap& operator=(const TcpBootstrap&) = delete;

  std::vector<std::string> all_gather(const std::string& bytes, const char* stage,
                                      int limit_ms) override;
  void check() override;

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
  void accept_ranks(const std::string& address, int port, const Step& step);
  void greet_visitors(const tcp::Descriptor& listener, int port,
                      std::vector<tcp::Connection>& visitors);
  void admit(tcp::Connection& visitor);
  void join(const std::string& address, int port, const Step& step);
  bool try_root(const std::string& address, int port, int at, Clock::time_point until);

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

  // Failing. `fail` tells the other ranks as far as they can be reached.
  Error missing_error(const Step& step, int peer, int present) const;
  [[noreturn]] void fail(const Error& error, int failed_rank);
  [[noreturn]] void lost(int rank, const std::string& when);
  [[noreturn]] void hear_verdict(const std::string& verdict, const Step* step);
  void tell(tcp::FrameKind kind, const std::string& payload);

  tcp::Connection& root() { return connections_[0]; }
  std::vector<tcp::Connection*> all_connections();

  const int rank_;
  const int size_;
  FailureLatch failure_;
  std::uint64_t round_ = 0;  // all_gathers so far
  /// On rank 0: by rank, the first one unused; elsewhere: the one to rank 0.
  std::vector<tcp::Connection> connections_;
};

/// A port of the loopback interface that nobody listens at now.
int free_tcp_port();

}  // namespace uniep
