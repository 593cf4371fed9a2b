#pragma once

#include "tuning/tune_run.h"

namespace uniep::tool {

/// Throws Error(kCapacity), which names a budget that would do, where that of a search on CPU ranks
/// is far from enough for a round of its candidates: told by the shape alone, before the machine is
/// measured or a layer made. What an earlier session has of that round is not known yet, so where
/// there are sessions the search itself finds out.
void require_least_budget(const TuneFlags& flags, const workload::ShapeSpec& spec, int ranks);

/// Throws as require_least_budget does, but for the first direction, told by passes of the default:
/// if the budget is so short that measuring the machine, which comes next, would take longer than
/// these.
void require_budget_of_a_round(const TuneFlags& flags, const BenchCase& bench,
                               const tune::TuneSettings& settings, const Ranks& ranks);

}  // namespace uniep::tool
