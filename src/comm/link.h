#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <vector>

namespace uniep {

using Clock = std::chrono::steady_clock;

/// Emulates the time that transfers between ranks take: each rank has one full-duplex port of a
/// given speed, a transfer occupies the sender's outgoing and the receiver's incoming side from the
/// moment both are free, and is visible a latency after its last byte. Data itself moves by memcpy.
class Link {
 public:
  /// `gigabytes_per_second` 0: transfers take no time.
  Link(int num_ranks, double gigabytes_per_second, double latency_us)
      : ns_per_byte_(gigabytes_per_second > 0 ? 1.0 / gigabytes_per_second : 0),
        latency_(static_cast<std::int64_t>(latency_us * 1e3)),
        out_free_(static_cast<std::size_t>(num_ranks)),
        in_free_(static_cast<std::size_t>(num_ranks)) {}

  bool enabled() const { return ns_per_byte_ > 0; }

  /// Books a transfer that is asked for at `asked`, and returns when its data is visible at `to`.
  Clock::time_point reserve(int from, int to, std::int64_t bytes, Clock::time_point asked) {
    if (!enabled() || from == to) return asked;
    const std::scoped_lock lock(mutex_);
    Clock::time_point& out = out_free_[static_cast<std::size_t>(from)];
    Clock::time_point& in = in_free_[static_cast<std::size_t>(to)];
    const Clock::time_point start = std::max({asked, out, in});
    const std::chrono::nanoseconds duration(
        static_cast<std::int64_t>(static_cast<double>(bytes) * ns_per_byte_));
    out = in = start + duration;
    return out + latency_;
  }

 private:
  const double ns_per_byte_;
  const std::chrono::nanoseconds latency_;
  std::mutex mutex_;
  std::vector<Clock::time_point> out_free_;
  std::vector<Clock::time_point> in_free_;
};

}  // namespace uniep
