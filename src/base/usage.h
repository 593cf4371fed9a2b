#pragma once

#include <unistd.h>

#include <atomic>
#include <thread>

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

/// The thread that is in a collective call of a group. Calls of all layers of a group meet in one
/// place, in the same order on all ranks.
class CollectiveUse {
 public:
  /// A call, for as long as it lives; calls within it are its thread's own. Throws
  /// Error(kInvalidArgument) while another thread's lasts.
  class Call {
   public:
    explicit Call(CollectiveUse& use) : use_(use) {
      std::thread::id who;  // nobody
      const auto self = std::this_thread::get_id();
      first_ = use.thread_.compare_exchange_strong(who, self, std::memory_order_acquire);
      require(first_ || who == self, ErrorCode::kInvalidArgument,
              "another thread is in a collective call of this group; one call at a time, in the "
              "same order on all ranks, is accepted");
    }
    ~Call() {
      if (first_) use_.thread_.store({}, std::memory_order_release);
    }
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

   private:
    CollectiveUse& use_;
    bool first_ = false;
  };

 private:
  std::atomic<std::thread::id> thread_{};
};

}  // namespace uniep
