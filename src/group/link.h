#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>

#include "base/rank_limits.h"
#include "group/backoff.h"

namespace uniep {

using Clock = std::chrono::steady_clock;

/// The memory of a Link, which processes may share: when each port is free, in nanoseconds of the
/// steady clock, which all processes of a host have in common.
struct LinkBoard {
  std::atomic<std::uint64_t> holder{0};  // who books, by number; 0: nobody
  std::atomic<std::uint64_t> numbers{0};
  std::atomic<std::int64_t> out_free[kMaxGroupRanks] = {};
  std::atomic<std::int64_t> in_free[kMaxGroupRanks] = {};
  static_assert(std::atomic<std::int64_t>::is_always_lock_free);
};

/// Emulates the time that transfers between ranks take: each rank has one full-duplex port of a
/// given speed, a transfer occupies the sender's outgoing and the receiver's incoming side from the
/// moment both are free, and is visible a latency after its last byte. Data itself moves by memcpy.
class Link {
 public:
  /// `gigabytes_per_second` 0: transfers take no time.
  Link(double gigabytes_per_second, double latency_us)
      : Link(std::make_shared<LinkBoard>(), gigabytes_per_second, latency_us) {}
  Link(std::shared_ptr<LinkBoard> board, double gigabytes_per_second, double latency_us)
      : ns_per_byte_(gigabytes_per_second > 0 ? 1.0 / gigabytes_per_second : 0),
        latency_(static_cast<std::int64_t>(latency_us * 1e3)),
        board_(std::move(board)) {}

  bool enabled() const { return ns_per_byte_ > 0; }

  /// Books a transfer that is asked for at `asked`, and returns when its data is visible at `to`.
  Clock::time_point reserve(int from, int to, std::int64_t bytes, Clock::time_point asked) {
    if (!enabled() || from == to) return asked;
    const Booking booking(*board_);
    std::atomic<std::int64_t>& out = board_->out_free[from];
    std::atomic<std::int64_t>& in = board_->in_free[to];
    const std::int64_t start = std::max({nanoseconds(asked), out.load(std::memory_order_relaxed),
                                         in.load(std::memory_order_relaxed)});
    const std::int64_t end =
        start + static_cast<std::int64_t>(static_cast<double>(bytes) * ns_per_byte_);
    out.store(end, std::memory_order_relaxed);
    in.store(end, std::memory_order_relaxed);
    return Clock::time_point(std::chrono::nanoseconds(end)) + latency_;
  }

 private:
  static std::int64_t nanoseconds(Clock::time_point t) {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(t.time_since_epoch()).count();
  }

  /// One transfer at a time is booked. A process that was killed or stopped over a booking must not
  /// keep the others, so after a while they go ahead: at worst two transfers share a port.
  class Booking {
   public:
    explicit Booking(LinkBoard& board)
        : board_(board), number_(1 + board.numbers.fetch_add(1, std::memory_order_relaxed)) {
      constexpr std::chrono::milliseconds kPatience(100);
      Backoff backoff;
      std::uint64_t seen = 0;
      Clock::time_point since;
      for (;;) {
        std::uint64_t holder = 0;
        if (take(holder)) return;
        if (holder != seen) {
          seen = holder;
          since = Clock::now();
        } else if (Clock::now() - since > kPatience && take(holder)) {
          return;
        }
        backoff.pause();
      }
    }
    ~Booking() {
      std::uint64_t own = number_;
      board_.holder.compare_exchange_strong(own, 0, std::memory_order_release,
                                            std::memory_order_relaxed);
    }
    Booking(const Booking&) = delete;
    Booking& operator=(const Booking&) = delete;

   private:
    /// Takes the place of `from`; else says who has it.
    bool take(std::uint64_t& from) {
      return board_.holder.compare_exchange_strong(from, number_, std::memory_order_acquire,
                                                   std::memory_order_relaxed);
    }

    LinkBoard& board_;
    const std::uint64_t number_;
  };

  const double ns_per_byte_;
  const std::chrono::nanoseconds latency_;
  const std::shared_ptr<LinkBoard> board_;
};

}  // namespace uniep
