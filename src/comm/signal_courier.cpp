#include "comm/signal_courier.h"

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
                         std::uint32_t* counter, std::uint32_t amount) {
  {
    const std::scoped_lock lock(mutex_);
    parcels_.push({due, std::move(keeps_alive), counter, amount});
  }
  changed_.notify_one();
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
      const Parcel& p = parcels_.top();
      std::atomic_ref(*p.counter).fetch_add(p.amount, std::memory_order_release);
      parcels_.pop();
    }
  }
}

}  // namespace uniep
