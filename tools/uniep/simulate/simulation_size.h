#pragma once

#include "tune/model/cost_model.h"
#include "uniep/schedule.h"
#include "workload/synthetic.h"

namespace uniep::tool {

/// Throws Error(kCapacity) where simulating a layer at so many ranks would take minutes or memory
/// without end: estimated from the shape alone, before anything is allocated. One rank stands for
/// more than `most_simulated`.
void require_simulable(const workload::ShapeSpec& spec, int ranks, const Schedule& schedule,
                       int most_simulated = tune::kMostSimulatedRanks);

}  // namespace uniep::tool
