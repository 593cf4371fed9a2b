#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/descriptor.h"
#include "uniep/rank_layout.h"

namespace uniep {

/// How other processes find and see a process: by its number in its namespace of numbers.
struct ProcessId {
  std::int32_t pid = 0;
  char pid_namespace[44] = {};  ///< "pid:[4026531836]"; empty: not known
};
ProcessId this_process();

/// Sees the processes of a group end.
class ProcessWatch {
 public:
  /// A watch of the processes on `own_rank`'s host. Nothing if they do not see each other, or the
  /// system cannot watch them.
  static std::shared_ptr<const ProcessWatch> of(int own_rank, const std::vector<ProcessId>& ids,
                                                const RankLayout& layout);

  /// Throws Error(kIo) if this process had too few descriptors left to watch all of them.
  void require_complete() const;

  pid_t pid(int rank) const { return peers_[static_cast<std::size_t>(rank)].pid; }

  /// "rank 1 was lost: process 123 ended"; nothing while it runs, is stopped, or is this one. Never
  /// waits.
  std::optional<std::string> end_of(int rank) const;

 private:
  struct Peer {
    pid_t pid;
    Descriptor process;  // a pidfd; not open: it had ended when the watch was made
    bool watched;
  };
  ProcessWatch(std::vector<Peer> peers, int error) : peers_(std::move(peers)), error_(error) {}

  const std::vector<Peer> peers_;
  const int error_;  // EMFILE or ENFILE, after which nobody else is watched; or 0
};

}  // namespace uniep
