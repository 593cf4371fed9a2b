#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tune/book/cache.h"

namespace uniep::tune {

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
  TuneKey key;
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

}  // namespace uniep::tune
