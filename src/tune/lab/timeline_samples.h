#pragma once

#include <span>
#include <vector>

#include "schedule/block_tasks.h"
#include "uniep/timeline.h"

namespace uniep::tune {

/// The task of a stage that timelines give this number: the inverse of `Task::tile`.
Task task_numbered(const PassView& v, Stage stage, std::int64_t tile);

/// A task as a timeline shows it, in seconds.
struct TaskSample {
  Task task;
  double begin = 0;
  double end = 0;
  double busy = 0;  ///< without waits
  /// What it added to its worker's time: since the end of the worker's task before, within the
  /// launch; 0 where it was the first. Of main queues, where no input is waited for, that is what
  /// a task costs, whatever of it overlaps with its neighbours.
  double turn = 0;
};

/// The tasks of one stage of the pass.
std::vector<TaskSample> task_samples(const PassView& v, Stage stage,
                                     std::span<const TimelineEvent> events);

/// Seconds between each launch's last end and the next one's first begin.
std::vector<double> launch_gaps(std::span<const TimelineEvent> events);

/// When the stage's last task ended, and how long after the first began; 0 where there are none.
struct StageSpan {
  double end = 0;
  double seconds = 0;
};
StageSpan stage_span(Stage stage, std::span<const TimelineEvent> events);

}  // namespace uniep::tune
