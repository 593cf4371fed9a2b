#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "uniep/timeline.h"

namespace uniep::trace {

/// How one rank's processors (threads, SMs) spent a pass. Seconds; those of a processor count once
/// however many of its workers are at something.
struct TimeUse {
  int processors = 0;  ///< that took a task
  double span_s = 0;   ///< from the first task taken to the last one done
  /// While no worker computes, and one dispatches, waits for inputs or waits for the link.
  double exposed_s = 0;
  /// The time of each launch from when the first processor has no tasks left until the last has
  /// none, added up. Processors that only ever dispatch do not count.
  double tail_s = 0;
  /// The rate of the processors' clock while they are at tasks, in cycles a second; 0: none were
  /// counted.
  double clock_hz = 0;

  // Summed over processors; together `processors * span_s`.
  std::array<double, kMaxStages> stage_s{};
  double waiting_s = 0;  ///< for inputs or the link, and at nothing else
  double idle_s = 0;     ///< without a task

  double total_s() const { return processors * span_s; }
};

/// `events` are those of one rank; those of other passes are left out.
TimeUse time_use(std::span<const TimelineEvent> events, Pass pass);

}  // namespace uniep::trace
