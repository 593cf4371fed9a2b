#pragma once

#include <optional>
#include <string>

#include "bench/bench_case.h"
#include "bench/device_ranks.h"
#include "tune/search/tuner.h"

namespace uniep::tool {

/// What the words begin with that `search_for` makes: a session's file has others before them.
inline constexpr const char* kSearchFor = "search for ";

/// What a session searches, in words for people: "search for the forward pass of tiny,... ".
std::string search_for(const BenchCase& bench, Pass pass, const tune::TuneSettings& settings,
                       const std::string& device);

/// What a session of `uniep tune` must be of to be gone on with (tune::TuneSubject::search).
std::string search_text(const BenchCase& bench, const tune::TuneSettings& settings);

/// What budget would do for a search of a direction, told by passes of the default; nothing where
/// that of `settings` does. Only on the process that speaks.
std::optional<double> missing_budget_s(const BenchCase& bench, Pass pass,
                                       const tune::TuneSettings& settings, const Ranks& ranks);

/// Searches the space for the fastest schedule of a direction and stores what it found. To be
/// called on every process; the outcome is that of the one that speaks, others have its `end` where
/// that is an interruption.
tune::TuneOutcome tune_pass(const BenchCase& bench, Pass pass, const tune::TuneSettings& settings,
                            const Ranks& ranks);

}  // namespace uniep::tool
