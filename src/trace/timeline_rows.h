#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "uniep/timeline.h"

namespace uniep::trace {

/// The events of one worker, by the time at which they begin.
struct WorkerRow {
  int rank = 0;
  int worker = 0;
  std::vector<TimelineEvent> events;
};

/// Rows by rank, then by worker; element r of `by_rank` has the events of rank r, in any order.
std::vector<WorkerRow> worker_rows(std::span<const std::vector<TimelineEvent>> by_rank);

/// The time that all events cover. An empty timeline covers [0, 0].
struct TimeSpan {
  std::int64_t begin_ns = 0;
  std::int64_t end_ns = 0;
};
TimeSpan time_span(std::span<const WorkerRow> rows);

}  // namespace uniep::trace
