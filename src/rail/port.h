#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>

namespace uniep {

/// One direction of a port of a network that is emulated: bytes pass one after another.
class Port {
 public:
  using Clock = std::chrono::steady_clock;

  /// 0: they take no time.
  explicit Port(double gigabytes_per_second)
      : ns_per_byte_(gigabytes_per_second > 0 ? 1.0 / gigabytes_per_second : 0) {}

  /// When the last of `bytes` has left that wait for the port from now on.
  Clock::time_point send(std::size_t bytes, Clock::time_point now) {
    return free_ = std::max(now, free_) + time_of(bytes);
  }
  /// When the last of `bytes` has come in, of which the sender's port has let the last pass now, or
  /// somewhat earlier: threads wake late, and what one block was late the next must not be.
  Clock::time_point receive(std::size_t bytes, Clock::time_point now) {
    free_ = std::max(now - kLate, free_ + time_of(bytes));
    return std::max(now, free_);
  }

 private:
  static constexpr std::chrono::milliseconds kLate{1};

  std::chrono::nanoseconds time_of(std::size_t bytes) const {
    return std::chrono::nanoseconds(
        static_cast<std::int64_t>(static_cast<double>(bytes) * ns_per_byte_));
  }

  double ns_per_byte_;
  Clock::time_point free_{};
};

}  // namespace uniep
