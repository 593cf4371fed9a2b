#pragma once

#include "tuning/tune_run.h"

namespace uniep::tool {

/// Throws Error(kCapacity), which names a budget that would do, where that of a search on CPU ranks
/// is far from enough for a round of its candidates: told by the shape alone, before the machine is
/// measured or a layer made. What an earlier session has of that round is not known yet, so where
/// there are sessions the search itself finds out.
void require_least_budget(const TuneFlags& flags, const workload::ShapeSpec& spec, int ranks);

}  // namespace uniep::tool
