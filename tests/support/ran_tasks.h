#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <tuple>
#include <vector>

#include "schedule/launches.h"
#include "schedule/queue.h"
#include "schedule/queue_table.h"
#include "uniep/timeline.h"

namespace uniep::testing {

/// Stage, global expert, tile and launch of a task.
using Ran = std::tuple<Stage, std::int64_t, std::int64_t, int>;

/// All tasks of a pass on one rank, sorted.
inline std::vector<Ran> tasks_of(const PassView& v, std::int64_t first_expert) {
  std::vector<Ran> tasks;
  for (int i = 0; i < num_launches(v); ++i) {
    const Launch launch = launch_at(v, i);
    for (const TrackList& tracks : {launch.comm, launch.main}) {
      const QueueTable queue(v, tracks);
      for_each_task(v, queue.view(), [&](const Task& t) {
        const std::int64_t expert = t.expert < 0 ? -1 : first_expert + t.expert;
        tasks.emplace_back(t.stage, expert, t.tile, launch_number(v, i));
      });
    }
  }
  std::ranges::sort(tasks);
  return tasks;
}

/// Those that a timeline has.
inline std::vector<Ran> tasks_of(std::span<const TimelineEvent> events) {
  std::vector<Ran> tasks;
  for (const TimelineEvent& e : events) tasks.emplace_back(e.stage, e.expert, e.tile, e.launch);
  std::ranges::sort(tasks);
  return tasks;
}

}  // namespace uniep::testing
