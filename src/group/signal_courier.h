#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <queue>
#include <thread>
#include <vector>

#include "base/threads.h"
#include "group/link.h"

namespace uniep {

/// Delivers counter signals at a later time: with an emulated link, data that a worker pushed
/// becomes visible, that is signalled, only when the link would have carried it.
class SignalCourier {
 public:
  struct Add {
    std::uint32_t* counter;
    std::uint32_t amount;
  };

  SignalCourier() : thread_(start_thread([this] { run(); })) {}
  ~SignalCourier();

  /// Makes all additions (release) at `due`. `keeps_alive` owns the counters' memory.
  void send(Clock::time_point due, std::shared_ptr<void> keeps_alive, std::vector<Add> adds);

  /// Waits until all that was sent has been delivered, or until `give_up`.
  void finish(const std::function<bool()>& give_up);

 private:
  struct Parcel {
    Clock::time_point due;
    std::shared_ptr<void> keeps_alive;
    std::vector<Add> adds;
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
