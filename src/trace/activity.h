#pragma once

#include <array>
#include <cstddef>
#include <vector>

#include "trace/svg.h"
#include "trace/timeline_rows.h"

namespace uniep::trace {

// What a worker does at a moment: a stage, or one of these.
inline constexpr std::size_t kLink = kNumStages;
inline constexpr std::size_t kWait = kNumStages + 1;
inline constexpr std::size_t kActivities = kNumStages + 2;
inline constexpr std::size_t kIdle = kActivities;

Fill activity_fill(std::size_t activity);
/// "fc1", "waiting for inputs"
std::string_view activity_name(std::size_t activity);

/// How the time of workers divides among activities, in columns of equal duration.
class Activity {
 public:
  Activity(const TimeSpan& span, std::size_t columns);

  void add(const TimelineEvent& event);

  /// The activity's share of the column's duration, summed over workers.
  double share(std::size_t column, std::size_t activity) const { return share_[column][activity]; }
  /// What took most of a worker's time; kIdle where half of it or more went to nothing.
  std::size_t dominant(std::size_t column) const;
  std::size_t columns() const { return share_.size(); }

 private:
  void add(std::size_t activity, std::int64_t begin_ns, std::int64_t end_ns);

  double begin_ns_;
  double columns_per_ns_;
  std::vector<std::array<double, kActivities>> share_;
};

}  // namespace uniep::trace
