#include "group/process_watch.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "base/check.h"

namespace uniep {

ProcessId this_process() {
  ProcessId id{.pid = getpid()};
  // One byte less than there is room, so that it ends with a zero.
  if (readlink("/proc/self/ns/pid", id.pid_namespace, sizeof(id.pid_namespace) - 1) < 0) {
    id.pid_namespace[0] = '\0';
  }
  return id;
}

std::shared_ptr<const ProcessWatch> ProcessWatch::of(int own_rank,
                                                     const std::vector<ProcessId>& ids,
                                                     const RankLayout& layout) {
  const ProcessId& own = ids[static_cast<std::size_t>(own_rank)];
  std::vector<Peer> peers;
  int error = 0;
  for (std::size_t r = 0; r < ids.size(); ++r) {
    const int rank = static_cast<int>(r);
    const bool is_here = layout.same_host(rank, own_rank);
    const bool known =
        ids[r].pid_namespace[0] != '\0' &&
        std::memcmp(ids[r].pid_namespace, own.pid_namespace, sizeof(own.pid_namespace)) == 0;
    if (is_here && !known) return nullptr;
    Peer peer{.pid = ids[r].pid,
              .process = Descriptor(),
              .watched = is_here && rank != own_rank && error == 0};
    if (peer.watched) {
      peer.process = Descriptor(static_cast<int>(syscall(SYS_pidfd_open, peer.pid, 0)));
      if (!peer.process.valid() && (errno == EMFILE || errno == ENFILE)) {
        error = errno;
        peer.watched = false;
      } else if (!peer.process.valid() && errno != ESRCH) {
        return nullptr;
      }
    }
    peers.push_back(std::move(peer));
  }
  return std::shared_ptr<const ProcessWatch>(new ProcessWatch(std::move(peers), error));
}

void ProcessWatch::require_complete() const {
  require(error_ == 0, ErrorCode::kIo, "the group's processes cannot be watched (",
          std::strerror(error_), "); more descriptors (ulimit -n) are accepted");
}

std::optional<std::string> ProcessWatch::end_of(int rank) const {
  const Peer& peer = peers_[static_cast<std::size_t>(rank)];
  if (!peer.watched) return std::nullopt;
  pollfd polled{.fd = peer.process.get(), .events = POLLIN, .revents = 0};
  if (peer.process.valid() && poll(&polled, 1, 0) != 1) return std::nullopt;
  return cat("rank ", rank, " was lost: process ", peer.pid, " ended");
}

}  // namespace uniep
