#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "tune/min_heap.h"
#include "tune/ring.h"

namespace uniep::tune {

/// What happens next in simulated time. Of equal times, what was asked for first goes first.
class EventQueue {
 public:
  enum class Step { kTake, kDraw, kWait, kPulled, kPushed, kLaunch };
  struct Event {
    double time = 0;
    std::int64_t order = 0;
    Step step = Step::kTake;
    int target = 0;  ///< a unit, or a rank for kLaunch
    bool before(const Event& other) const {
      return static_cast<bool>((time < other.time) |
                               ((time == other.time) & (order < other.order)));
    }
  };

  void at(double time, Step step, int target) { others_.push({time, next_order_++, step, target}); }

  /// A kDraw, no earlier than the one before. Every task asks for one: they need no heap.
  void draw_at(double time, int target) {
    draws_.push_back({time, next_order_++, Step::kDraw, target});
  }

  /// The time of the next; infinity where nothing is to happen.
  double next() const {
    return std::min(draws_.empty() ? kNever : draws_.front().time,
                    others_.empty() ? kNever : others_.top().time);
  }

  Event pop() {
    const bool draw = others_.empty() || (!draws_.empty() && draws_.front().before(others_.top()));
    const Event event = draw ? draws_.front() : others_.top();
    if (draw) {
      draws_.pop_front();
    } else {
      others_.pop();
    }
    return event;
  }

 private:
  static constexpr double kNever = std::numeric_limits<double>::infinity();

  std::int64_t next_order_ = 0;
  MinHeap<Event> others_;
  Ring<Event> draws_;
};

}  // namespace uniep::tune
