#pragma once

#include "tune/model/cost_model.h"
#include "uniep/schedule.h"
#include "workload/synthetic.h"

namespace uniep::tool {

/// Throws Error(kCapacity) where simulating a layer at so many ranks would take minutes or memory
/// without end: estimated from the shape alone, before anything is allocated. `simulated` of the
/// ranks stand for all.
void require_simulable(const workload::ShapeSpec& spec, int ranks, const Schedule& schedule,
                       int simulated);

}  // namespace uniep::tool
