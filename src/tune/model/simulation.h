#pragma once

#include <span>
#include <vector>

#include "schedule/pass_order.h"
#include "tune/model/machine_profile.h"
#include "tune/model/network.h"
#include "uniep/routing_plan.h"
#include "uniep/timeline.h"

namespace uniep::tune {

struct SimulationOptions {
  Topology topology{};
  bool record_timeline = false;
  PassPart part = PassPart::kWhole;
  /// When tokens come that come in waves (Problem::gathered_hosts), by wave; those of waves that it
  /// lacks are there.
  std::vector<double> waves_come{};
  const Graph* graph = &kLayerGraph;  ///< the stages of the pass
};

struct SimulatedPass {
  double seconds = 0;                                ///< until the last rank is done
  LinkBytes bytes;                                   ///< tokens and rows that ranks moved
  std::vector<double> launch_ends;                   ///< of each launch, on the last rank
  std::vector<PassStats> stats;                      ///< of each simulated rank
  std::vector<std::vector<TimelineEvent>> timeline;  ///< [rank], where it was asked for
};

/// Runs a pass in simulated time: the tasks, queues, waits and signals that the backends run, taken
/// from the same functions, with costs from a profile. `plans` are those of every rank of the
/// group; or of a single rank of a larger group on one host, or of all ranks of one of several
/// hosts, which then stand for all: the others are taken to do what they do at the same time, so
/// rows come back from them when their own have been sent.
SimulatedPass simulate(std::span<const RoutingPlan> plans, Pass pass, const Schedule& schedule,
                       const MachineProfile& profile, const SimulationOptions& options = {});

/// Workers of a rank with this schedule, as its backend would start them.
int simulated_workers(const MachineProfile& profile, const Schedule& schedule, int ranks);

}  // namespace uniep::tune
