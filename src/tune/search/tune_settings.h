#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "tune/model/machine_profile.h"
#include "tune/model/network.h"
#include "uniep/stage.h"

namespace uniep::tune {

/// How far a search has come.
struct TuneState {
  Pass pass = Pass::kForward;
  int rounds = 0;  ///< that are complete
  std::size_t running = 0, candidates = 0;
  double spent_s = 0;               ///< of the budget
  std::optional<double> best_s{};   ///< median of the fastest so far; nothing before a round
  std::optional<double> speedup{};  ///< and how many times as long the default takes
};

/// What is told of a search while it runs, and what it asks, both on the rank that leads it.
struct TuneWatch {
  std::function<void(const TuneState&)> measured = [](const TuneState&) {};  ///< after each pass
  std::function<bool()> stop = [] { return false; };
};

struct TuneSettings {
  double budget_s = 60;         ///< for a direction: the layer, model and measurements together
  std::size_t candidates = 16;  ///< that the model proposes, besides the default and the presets
  std::string restriction;      ///< of the space, as Space::restrict_to takes it
  std::optional<MachineProfile> profile;  ///< nothing: candidates are random
  Topology topology{};                    ///< beside a profile: what lies between several hosts
  int max_rounds = 200;
  std::uint64_t seed = 1;    ///< of the search; the layer has its own
  std::string cache;         ///< path of the cache; empty: nothing is stored
  bool keep_session = true;  ///< beside the cache, so that a search can be gone on with
  bool resume = true;        ///< goes on with an earlier session
  TuneWatch watch{};
};

}  // namespace uniep::tune
