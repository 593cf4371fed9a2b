#pragma once

#include <optional>
#include <vector>

#include "cuda/pass_clock.h"
#include "cuda/pass_trace.h"
#include "cuda/stream_order.h"
#include "uniep/routing_plan.h"
#include "uniep/schedule.h"
#include "uniep/timeline.h"

namespace uniep::cuda {

/// What the passes of a layer did, and when: times and bytes of the last one, and where timelines
/// are recorded the tasks of all.
class PassRecord {
 public:
  /// `sms`: that a pass may hold. `experts`: what timelines call each expert of this rank.
  PassRecord(int sms, std::vector<std::int32_t> experts, bool record_timeline);

  /// A pass of this plan, or `part` of one, comes next.
  void announce(const RoutingPlan& plan, PassPart part, const Schedule& schedule,
                const StreamOrder& calls);
  /// The pass begins: its launches come next.
  void start(Pass pass, const StreamOrder& calls);
  /// Ends a launch; without a stage where it holds several.
  void lap(std::optional<Stage> stage, cudaStream_t stream) { clock_.lap(stage, stream); }

  /// The part of the record that kernels write.
  DeviceTrace trace() const { return trace_ ? trace_->device() : DeviceTrace{}; }

  /// Moves what the last pass to run wrote there to the host, when the stream has done it.
  void collect_trace(cudaStream_t stream);
  /// Lets go of the memory of the last pass' plan.
  void forget_plan() { plan_.reset(); }

  /// The times and traffic of the last pass, when it is done.
  PassStats stats() const;
  std::vector<TimelineEvent> take_timeline(cudaStream_t stream);

 private:
  const int sms_;
  PassClock clock_;
  std::optional<PassTrace> trace_;
  std::vector<TimelineEvent> timeline_;     // of passes before the last
  std::optional<PassStats> traced_stages_;  // of the last pass, once they were collected
  // The plan of the last pass. Empty if the pass was captured or moved no rows, and if the plan is
  // the caller's.
  std::optional<RoutingPlan> plan_;
  Schedule schedule_;  // of the last pass
};

}  // namespace uniep::cuda
