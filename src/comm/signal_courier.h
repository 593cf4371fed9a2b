#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <queue>
#include <thread>
#include <vector>

#include "comm/link.h"

namespace uniep {

/// Delivers counter signals at a later time: with an emulated link, data that a worker pushed
/// becomes visible, that is signalled, only when the link would have carried it.
class SignalCourier {
 public:
  SignalCourier() : thread_([this] { run(); }) {}
  ~SignalCourier();

  /// Adds `amount` to `*counter` (release) at `due`. `keeps_alive` owns the counter's memory.
  void send(Clock::time_point due, std::shared_ptr<void> keeps_alive, std::uint32_t* counter,
            std::uint32_t amount);

 private:
  struct Parcel {
    Clock::time_point due;
    std::shared_ptr<void> keeps_alive;
    std::uint32_t* counter;
    std::uint32_t amount;
    bool operator>(const Parcel& other) const { return due > other.due; }
  };

  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::priority_queue<Parcel, std::vector<Parcel>, std::greater<>> parcels_;
  bool stopping_ = false;
  std::thread thread_;  // last: starts when everything else is there
};

}  // namespace uniep
