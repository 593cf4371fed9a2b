#pragma once

#include <atomic>
#include <mutex>
#include <string>

#include "uniep/error.h"

namespace uniep {

/// The group's first failure. Every wait looks at it, so that one rank's error ends all ranks'
/// passes instead of leaving them to wait for it.
class FailureLatch {
 public:
  /// Keeps the first call's failure; later ones are ignored.
  void raise(int rank, const std::string& sentence) {
    const std::scoped_lock lock(mutex_);
    if (raised_.load(std::memory_order_relaxed)) return;
    rank_ = rank;
    sentence_ = sentence;
    raised_.store(true, std::memory_order_release);
  }

  bool raised() const { return raised_.load(std::memory_order_acquire); }

  /// Throws Error(kPeerFailed) where a failure was raised.
  void check() const {
    if (raised()) [[unlikely]] {
      throw Error(ErrorCode::kPeerFailed, "the group is unusable since rank " +
                                              std::to_string(rank_) + " failed: " + sentence_);
    }
  }

 private:
  std::mutex mutex_;
  std::atomic<bool> raised_{false};
  int rank_ = -1;
  std::string sentence_;
};

}  // namespace uniep
