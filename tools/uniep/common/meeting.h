#pragma once

#include <atomic>
#include <barrier>
#include <functional>

#include "group/gatherer.h"

namespace uniep::tool {

/// How ranks wait for one another.
struct Meeting {
  std::function<void()> all_here;
  /// Waits for all, and returns what rank 0 says. A signal need not have reached all ranks.
  std::function<bool(bool own)> ask_leader;
};

/// The meetings of threads.
class ThreadMeeting {
 public:
  explicit ThreadMeeting(int ranks) : barrier_(ranks) {}

  Meeting of_rank(int rank) {
    return {.all_here = [this] { barrier_.arrive_and_wait(); },
            .ask_leader =
                [this, rank](bool own) {
                  if (rank == 0) said_ = own;
                  barrier_.arrive_and_wait();
                  const bool said = said_;
                  barrier_.arrive_and_wait();  // before the next question
                  return said;
                }};
  }
  std::barrier<>& barrier() { return barrier_; }

 private:
  std::barrier<> barrier_;
  std::atomic<bool> said_ = false;
};

/// The meetings of processes.
inline Meeting meeting_of(Gatherer& gatherer) {
  return {.all_here = [&] { gatherer.meet(); },
          .ask_leader = [&](bool own) { return gatherer.gather_one(own ? 1 : 0)[0] != 0; }};
}

/// Leaves the barrier when a rank fails, so that the others come to hear of it rather than wait.
class Leave {
 public:
  explicit Leave(std::barrier<>& barrier) : barrier_(barrier) {}
  ~Leave() { (void)barrier_.arrive_and_drop(); }
  Leave(const Leave&) = delete;
  Leave& operator=(const Leave&) = delete;

 private:
  std::barrier<>& barrier_;
};

}  // namespace uniep::tool
