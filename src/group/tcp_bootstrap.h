#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "group/bootstrap.h"
#include "group/tcp_meeting.h"
#include "group/tcp_peers.h"

namespace uniep {

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
  void check() override { peers_.check(); }

  /// Instead of the meeting's, from now on.
  void watch(TcpWatch watch) { peers_.watch(std::move(watch)); }

  /// This rank takes no further part, and the others are told why; nothing where the group has
  /// failed already.
  void abandon(const std::string& sentence);

 private:
  tcp::Peers peers_;
  std::uint64_t round_ = 0;  // all_gathers so far
};

/// A port of the loopback interface that nobody listens at now.
int free_tcp_port();

}  // namespace uniep
