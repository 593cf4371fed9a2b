#pragma once

#include <string>
#include <vector>

#include "comm/bootstrap.h"
#include "comm/failure.h"
#include "comm/tcp_connection.h"
#include "uniep/error.h"

namespace uniep {

/// A Bootstrap among processes: every rank has a connection to rank 0, through which all goes.
/// Where a rank fails or its process ends, rank 0 tells all others, so that all throw alike.
class TcpBootstrap final : public Bootstrap {
 public:
  /// Collective. Rank 0 listens at `address`:`port`, or at the first free one of the 15 ports above
  /// where another program holds it; the others look for it there, and know it by its greeting.
  /// Connections of strangers are dropped. Throws Error(kTimeout) where a rank has not come after
  /// `limit_ms`, and Error(kInvalidArgument) where ranks disagree on the size of the group.
  TcpBootstrap(int rank, int size, const std::string& address, int port, int limit_ms);

  std::vector<std::string> all_gather(const std::string& bytes, const char* stage,
                                      int limit_ms) override;
  void check() override;

 private:
  using Parts = std::vector<std::string>;

  void accept_ranks(const std::string& address, int port, int limit_ms);
  void look_for_root(const std::string& address, int port, int limit_ms);

  Parts gather_as_root(const std::string& bytes, const char* stage, int limit_ms);
  Parts gather_as_member(const std::string& bytes, const char* stage, int limit_ms);
  void collect(Parts& parts, const char* stage, int limit_ms);
  void deliver(const Parts& parts, const char* stage, int limit_ms);
  void handle_report(int rank, const tcp::Frame& frame, bool missing_ranks);
  Parts await_result(const char* stage, int limit_ms);

  /// Ends the group's life: tells the other ranks as far as they can be reached, and throws.
  [[noreturn]] void fail(const Error& error, int failed_rank);
  [[noreturn]] void lost(int rank, const char* stage);
  [[noreturn]] void throw_verdict(const tcp::Frame& verdict, const char* stage, int limit_ms);

  const int rank_;
  const int size_;
  FailureLatch failure_;
  /// By rank on rank 0 (element 0 unused); the one to rank 0 elsewhere.
  std::vector<tcp::Connection> connections_;
};

/// A port of the loopback interface that nobody listens at now.
int free_tcp_port();

}  // namespace uniep
