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

/// At most `most` rows of each rank, spread evenly over its workers: a GPU has hundreds.
std::vector<WorkerRow> sampled_rows(const std::vector<WorkerRow>& rows, std::size_t most);

/// The time that all events cover. An empty timeline covers [0, 0].
struct TimeSpan {
  std::int64_t begin_ns = 0;
  std::int64_t end_ns = 0;
};
TimeSpan time_span(std::span<const WorkerRow> rows);

/// The waits within a task, made consistent (no interval is negative or leaves the task).
struct TaskTimes {
  std::int64_t begin_ns = 0;  ///< waits for inputs
  std::int64_t ready_ns = 0;  ///< works, but for the link's interval
  std::int64_t link_begin_ns = 0;
  std::int64_t link_end_ns = 0;
  std::int64_t end_ns = 0;
};

/// An event tells how long a task waited for the link, not when: a dispatch task awaits what it
/// pulls and then stores it, so its wait is drawn first; the others wait with their pushes, last.
TaskTimes task_times(const TimelineEvent& event);

}  // namespace uniep::trace
