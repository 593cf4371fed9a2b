#pragma once

#include <iosfwd>
#include <string>

#include "common/record_json.h"
#include "tuning/tuner.h"

namespace uniep::tool {

/// "forward round 12, 3.4 s: 5 of 20 left, best 1.234 ms, default 1.043 times as long"
std::string state_text(const tune::TuneState& state);

/// The axes in which a schedule is another than a backend's default, as --schedule takes them:
/// "lag=4,tile_m=32".
std::string difference_text(const Schedule& schedule, const Schedule& base);

/// What sets a candidate apart from the default. It was measured again for that, and where those
/// passes say the opposite of the race, that is said instead.
std::string why_text(const tune::TunedCandidate& candidate);

/// What was chosen, as --schedule takes it, which leaves other axes at the backend's default.
std::string best_schedule(const tune::TuneOutcome& out);

/// The best five and why they are fast, what was wrong, and what became of the best. `cache` is
/// where it is stored, `resume` how to go on with a search that did not end.
void print_outcome(std::ostream& out, const tune::TuneOutcome& outcome, const std::string& cache,
                   const std::string& resume);

/// Prints the candidates whose results had wrong bits, if any.
void print_rejected(std::ostream& out, const tune::TuneOutcome& outcome);

/// The record of a direction, as schema "uniep-tune-1" has it.
Json outcome_json(const tune::TuneOutcome& outcome);

}  // namespace uniep::tool
