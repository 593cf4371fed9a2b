#pragma once

#include "simulate/memory_plan.h"
#include "tuning/tune_run.h"

namespace uniep::tool {

/// Searches the schedules of both directions for each choice of save and recompute_h with which the
/// model fits, least predicted first, and says which choice is the fastest as measured. Prints,
/// writes and returns what run_tuning does. Throws Error(kCapacity) where nothing fits.
int run_memory_tuning(const TuneCall& call, const ModelMemory& model);

}  // namespace uniep::tool
