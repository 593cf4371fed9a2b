#include "group/tcp_bootstrap.h"

#include <exception>

#include "base/check.h"
#include "base/error_of.h"
#include "group/tcp_member.h"
#include "group/tcp_reception.h"
#include "group/tcp_root.h"
#include "group/tcp_socket.h"

namespace uniep {

TcpBootstrap::TcpBootstrap(int rank, int size, TcpMeeting meeting, int limit_ms)
    : peers_(rank, size, std::move(meeting.watch)) {
  if (size == 1) return;
  const tcp::Step step{.stage = "connect", .limit_ms = limit_ms};
  if (rank == 0) {
    tcp::receive_ranks(peers_, std::move(meeting), step);
  } else {
    tcp::join_root(peers_, meeting, step);
  }
}

TcpBootstrap::~TcpBootstrap() {
  if (!peers_.failure().raised() && std::uncaught_exceptions() == 0) {
    peers_.tell(tcp::FrameKind::kBye, "");
  }
}

std::vector<std::string> TcpBootstrap::all_gather(const std::string& bytes, const char* stage,
                                                  int limit_ms) {
  peers_.failure().check();
  if (peers_.size() == 1) return {bytes};
  const tcp::Step step{.stage = stage, .limit_ms = limit_ms, .round = ++round_};
  try {
    return peers_.rank() == 0 ? tcp::gather_as_root(peers_, bytes, step)
                              : tcp::gather_as_member(peers_, bytes, step);
  } catch (const std::exception& e) {
    // Whatever it was, the ranks are no longer in step, and nothing must be sent any more.
    peers_.failure().raise(peers_.rank(), error_of(e).what());
    throw;
  }
}

void TcpBootstrap::abandon(const std::string& sentence) {
  if (peers_.failure().raised()) return;
  try {
    const int rank = peers_.rank();
    peers_.fail(Error(ErrorCode::kPeerFailed, cat("rank ", rank, ": ", sentence)), rank);
  } catch (const Error&) {
    // Is for the others: here somebody knows already.
  }
}

int free_tcp_port() { return tcp::port_of(tcp::listen_at_any_port("127.0.0.1")); }

}  // namespace uniep
