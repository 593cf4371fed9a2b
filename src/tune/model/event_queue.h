#pragma once

#include <cstdint>
#include <limits>

#include "tune/model/min_heap.h"

namespace uniep::tune {

/// What happens next in simulated time. Of equal times, what was asked for first goes first.
class EventQueue {
 public:
  enum class Step { kTake, kWait, kPulled, kPushed, kCame, kLaunch };
  struct Event {
    double time = 0;
    std::int64_t order = 0;
    Step step = Step::kTake;
    int target = 0;  ///< a unit; a rank for kLaunch, a message for kCame
    bool before(const Event& other) const {
      return static_cast<bool>((time < other.time) |
                               ((time == other.time) & (order < other.order)));
    }
  };

  void at(double time, Step step, int target) { events_.push({time, next_order_++, step, target}); }

  /// The time of the next; infinity where nothing is to happen.
  double next() const {
    return events_.empty() ? std::numeric_limits<double>::infinity() : events_.top().time;
  }

  Event pop() {
    const Event event = events_.top();
    events_.pop();
    return event;
  }

 private:
  std::int64_t next_order_ = 0;
  MinHeap<Event> events_;
};

}  // namespace uniep::tune
