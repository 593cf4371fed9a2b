#pragma once

#include <optional>
#include <vector>

#include "schedule/pass_order.h"
#include "schedule/queue_table.h"
#include "tune/model/host_mirror.h"
#include "tune/model/pushed_tiles.h"
#include "tune/model/ring.h"
#include "tune/model/simulated_counters.h"
#include "tune/model/task_cost.h"
#include "uniep/timeline.h"

namespace uniep::tune {

/// A queue as workers empty it, draw by draw.
class DrawnQueue {
 public:
  DrawnQueue(const PassView& view, const TrackList& tracks) : queue_(view, tracks) {}

  bool empty() const { return next_ == queue_.view().size(); }
  Draw draw(const PassView& v) {
    const QueueView queue = queue_.view();
    while (next_ >= queue.begin[block_ + 1]) ++block_;
    return draw_at(v, queue, block_, next_++);
  }

 private:
  QueueTable queue_;
  std::int64_t next_ = 0;
  int block_ = 0;
};

/// What draws tasks from one queue and runs them one after another: a worker in the main queue, or
/// one of a worker's lanes in the communication queue.
struct Unit {
  int rank = 0;    ///< index among the simulated ones
  int worker = 0;  ///< of the rank
  bool in_comm = false;
  bool finished = false;
  int next_waiter = -1;
  std::uint32_t expected = 0;  ///< of the counter that it waits for
  Draw draw{};
  std::uint32_t taken = 0;  ///< tasks of the draw
  Task task{};              ///< the last of these, at hand
  double begun = 0;         ///< its wait for inputs
  double ready = 0;
  double linked = 0;      ///< seconds that the task at hand waited for the link
  double held = 0;        ///< until when the pushes of the task at hand keep it from going on
  double released = 0;    ///< when it could go on, its pushes being few enough
  double last_pull = -1;  ///< arrival, where its last task was a pull too
  Ring<double> pushes{};  ///< arrivals of those under way
};

/// Everything that a rank has of its own during a pass.
struct SimulatedRank {
  SimulatedRank(const PlanData& plan, Pass pass, const Schedule& schedule,
                const MachineProfile& profile, int workers, PassPart part, const Graph& graph);

  const PassView& view() const { return in_launch; }

  PassOrder order;
  PassView in_launch;  ///< the order's, as the launch at hand has it
  CounterTable counters;
  TaskCosts costs;
  PushedTiles pushed;
  std::vector<Launch> launches;
  std::vector<DrawnQueue> comm;  ///< by launch
  std::vector<DrawnQueue> main;
  int launch = -1;
  std::vector<double> launch_ends{};
  std::vector<int> lanes_left;  ///< of each worker, in the communication queue
  int active = 0;               ///< units that have not run out of tasks
  int pulling = 0;              ///< dispatch tasks under way
  /// Its pushes, which count as everybody's if it stands for all ranks.
  Counter mirrored{};
  std::int64_t pushes_left = 0;
  /// What the other hosts send, if its host stands for all.
  std::optional<HostMirror> other_hosts{};
  double done = 0;
  PassStats stats{};
  std::vector<TimelineEvent> timeline{};
};

}  // namespace uniep::tune
