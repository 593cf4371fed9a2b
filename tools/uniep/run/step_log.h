#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "group/gatherer.h"
#include "run/step.h"
#include "uniep/routing_plan.h"
#include "workload/split.h"

// What ranks measure in their steps, on either backend, and what a group makes of it.

namespace uniep::tool {

/// One direction on one rank, a step an element.
struct PassLog {
  std::vector<double> seconds;  ///< the whole call, with the ranks' agreement on its arguments
  std::vector<PassStats> stats;
};

/// What one rank measured.
struct RankLog {
  std::vector<double> plan_seconds;
  PassLog forward;
  PassLog backward;
  std::vector<TimelineEvent> timeline;
  std::vector<std::int64_t> rows_per_expert;
  Traffic traffic;
  PoolUse pool;
  std::string mismatch;  ///< what two steps did not agree on; empty: nothing
  bool interrupted = false;

  void note_routing(const RoutingPlan& plan);
};

/// The sentence for the first tensor of the rank's part of the results in which a step's bits are
/// not those of the first step; empty: there is none.
std::string difference(const workload::Split& split, int rank, PassChoice passes,
                       LayerResult& first, LayerResult& again, int step);

/// What the ranks of other processes measured, and this one.
std::vector<RankLog> gather_logs(Gatherer& gatherer, const RankLog& own);

/// Throws where a rank has noted a mismatch.
void combine_logs(std::vector<RankLog> logs, const StepOptions& options, StepReport& report);

}  // namespace uniep::tool
