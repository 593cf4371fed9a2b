#pragma once

#include <unistd.h>

#include <atomic>

#include "base/check.h"

namespace uniep {

/// Who calls an object: the process that made it, and one thread at a time.
class Usage {
 public:
  /// A call, for as long as it lives. Throws Error(kUnsupported) in a process that was forked off:
  /// threads, connections and devices stayed behind. Throws Error(kInvalidArgument) while another
  /// thread's call lasts, which would wait for this one's, or tear its state.
  class Call {
   public:
    explicit Call(Usage& usage) : usage_(usage) {
      usage.require_own_process();
      require(!usage.busy_.exchange(true, std::memory_order_acquire), ErrorCode::kInvalidArgument,
              "another thread is in a call of this layer; one call at a time is accepted");
    }
    ~Call() { usage_.busy_.store(false, std::memory_order_release); }
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

   private:
    Usage& usage_;
  };

  bool in_own_process() const { return getpid() == process_; }
  void require_own_process() const {
    require(in_own_process(), ErrorCode::kUnsupported, "process ", getpid(),
            " was forked from process ", process_,
            ", which made this group and its layers; a group that is made after the fork is "
            "accepted");
  }

 private:
  const pid_t process_ = getpid();
  std::atomic<bool> busy_ = false;
};

}  // namespace uniep
