#pragma once

#include <optional>
#include <string>
#include <vector>

#include "bench_case.h"
#include "ranks.h"
#include "schedule/space.h"
#include "tune/cache.h"
#include "tune/machine_profile.h"
#include "tune/race.h"
#include "tune/session.h"

namespace uniep::tool {

struct TuneSettings {
  double budget_s = 60;         ///< for a direction: the layer, model and measurements together
  std::size_t candidates = 16;  ///< that the model proposes, besides the default and the presets
  std::string restriction;      ///< of the space, as Space::restrict_to takes it
  std::optional<tune::MachineProfile> profile;  ///< nothing: candidates are random
  int max_rounds = 200;
  std::uint64_t seed = 1;  ///< of the search; the layer has its own
  std::string cache;       ///< path of the cache; sessions stand beside it
  bool resume = true;
};

/// How a search ended.
enum class TuneEnd { kDecided, kRounds, kBudget, kTooSmall, kInterrupted };

struct TunedCandidate {
  Schedule schedule;
  double predicted_s = 0;  ///< 0: not predicted
  std::vector<double> seconds{};
  double speedup = 1;   ///< over the default, round by round
  bool faster = false;  ///< by more than chance
  bool rejected = false;
  std::string why{};  ///< of the five best: what sets it apart from the default
};

struct TuneOutcome {
  tune::TuneKey key;
  double points = 0;         ///< of the space, as Space::combinations counts them
  std::size_t modelled = 0;  ///< points that the model looked at
  std::size_t resumed = 0;   ///< measurements of an earlier session
  std::size_t measurements = 0;
  int rounds = 0;
  bool conclusive = false;  ///< it was decided, or had rounds enough to call any faster
  double seconds = 0;       ///< that the search took
  TuneEnd end = TuneEnd::kDecided;
  double least_budget_s = 0;             ///< kTooSmall: what would do for a round
  std::vector<TunedCandidate> ranking;   ///< fastest first
  std::vector<TunedCandidate> rejected;  ///< whose results had wrong bits
  double default_s = 0;                  ///< median of the backend's default
  /// The first of the ranking; the default where that is not faster by more than chance.
  std::optional<TunedCandidate> chosen{};
  bool kept_default = false;
  bool stored = false;                ///< in the cache
  bool store_failed = false;          ///< the session is kept then
  std::vector<std::string> problems;  ///< files that could not be used
};

/// What a session must be of, besides its key, to be gone on with: the very layer, how it is
/// searched, and the program. Times of another are no times of this one.
std::string search_text(const BenchCase& bench, const TuneSettings& settings);

/// Searches the space for the fastest schedule of a direction and stores what it found. To be
/// called on every process; the outcome is that of the one that speaks, others have its `end` where
/// that is an interruption.
TuneOutcome tune_pass(const BenchCase& bench, Pass pass, const TuneSettings& settings,
                      const Ranks& ranks);

}  // namespace uniep::tool
