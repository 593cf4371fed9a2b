#pragma once

#include <algorithm>
#include <chrono>
#include <compare>
#include <cstdint>
#include <limits>

namespace uniep {

/// The moment up to which something is waited for. `std::min` gives the earlier of two.
class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  /// `time` from now on.
  static Deadline in(Clock::duration time) { return Deadline(Clock::now() + time); }

  bool expired() const { return Clock::now() >= at_; }

  /// Zero where it has expired.
  Clock::duration remaining() const {
    return std::max(at_ - Clock::now(), Clock::duration::zero());
  }

  /// What is left, as poll(2) takes it: rounded up, for with 0 poll would not wait at all while
  /// time is left.
  int poll_ms() const {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(remaining()).count();
    return static_cast<int>(std::min<std::int64_t>(left, std::numeric_limits<int>::max()));
  }

  friend auto operator<=>(const Deadline&, const Deadline&) = default;

 private:
  explicit Deadline(Clock::time_point at) : at_(at) {}

  Clock::time_point at_;
};

}  // namespace uniep
