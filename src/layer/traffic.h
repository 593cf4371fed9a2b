#pragma once

#include "uniep/layer.h"

namespace uniep {

/// Fills in what the pass of `stats` moves over the wire on the plan's rank.
void count_traffic(const RoutingPlan& plan, const Schedule& schedule, PassStats& stats);

}  // namespace uniep
