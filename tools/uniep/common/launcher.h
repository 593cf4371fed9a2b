#pragma once

#include <chrono>
#include <string>
#include <vector>

namespace uniep::tool {

struct LaunchOptions {
  std::string program = "/proc/self/exe";
  /// How long the other ranks may take to end of themselves when one has failed.
  std::chrono::milliseconds grace{5000};
  /// How long all may take when a signal has ended them: to finish a pass, and write what they
  /// have.
  std::chrono::milliseconds interrupted_grace{60000};
};

/// Runs `count` copies of a program, each with the arguments `argv` (its name first) and RANK,
/// WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT of its own, and waits for all. They share
/// this process' output, but for stderr of ranks other than 0, which comes when all have ended, and
/// not at all if such a rank refuses its input as rank 0 does: their sentences are the same. SIGINT
/// and SIGTERM are handed on to them, and they end with this process. If one fails, or a second
/// signal comes, the others are killed after a while. Returns 0, or what the first that failed
/// returned: its exit code, or 128 + the signal that ended it, of which a sentence tells. To be
/// called while this process has no other threads, which signals could reach.
int launch_ranks(int count, const std::vector<std::string>& argv,
                 const LaunchOptions& options = {});

}  // namespace uniep::tool
