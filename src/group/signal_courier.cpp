#include "group/signal_courier.h"

namespace uniep {

SignalCourier::~SignalCourier() {
  {
    const std::scoped_lock lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_one();
  thread_.join();
}

void SignalCourier::send(Clock::time_point due, std::shared_ptr<void> keeps_alive,
                         std::vector<Add> adds) {
  bool first = false;
  {
    const std::scoped_lock lock(mutex_);
    first = parcels_.empty() || due < parcels_.top().due;
    parcels_.push({due, std::move(keeps_alive), std::move(adds)});
  }
  // Otherwise it wakes in time, and waking it now would take a core from those that compute.
  if (first) changed_.notify_one();
}

void SignalCourier::finish(const std::function<bool()>& give_up) {
  std::unique_lock lock(mutex_);
  while (!parcels_.empty() && !give_up()) {
    lock.unlock();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    lock.lock();
  }
}

void SignalCourier::run() {
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    if (parcels_.empty()) {
      changed_.wait(lock);
    } else if (parcels_.top().due > Clock::now()) {
      const Clock::time_point due = parcels_.top().due;
      changed_.wait_until(lock, due);
    } else {
      for (const Add& add : parcels_.top().adds) {
        std::atomic_ref(*add.counter).fetch_add(add.amount, std::memory_order_release);
      }
      parcels_.pop();
    }
  }
}

}  // namespace uniep
