#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "schedule/space.h"
#include "tune/search/measurement.h"
#include "tune/search/session.h"
#include "tune/search/tune_outcome.h"
#include "tune/search/tune_settings.h"

namespace uniep::tune {

/// A direction of a layer that is to be tuned, as far as a search must know it.
struct TuneSubject {
  Problem problem;
  TuneKey key;
  std::vector<std::int64_t> tokens_per_rank;
  std::span<const std::int32_t> topk_ids;  ///< of all ranks, rank after rank; outlives the search
  /// What a session must be of, besides its key, to be gone on with: the very layer, how it is
  /// searched, and the program. Times of another are no times of this one.
  std::string identity;
};

/// Searches the space for the fastest schedule of a direction and stores what it found. It measures
/// through the functions that it is given, on the rank that leads.
class Tuner {
 public:
  /// The budget begins here. `settings` outlive this.
  Tuner(TuneSubject subject, const TuneSettings& settings);

  /// The default, which everything is compared with.
  const Schedule& base() const { return base_; }

  /// Measures the default, at most some times, and says by it what budget would do; nothing where
  /// this one does. The model of the machine need not be known yet.
  std::optional<double> missing_budget_s(const Measure& measure);

  TuneEnd search(const Measure& measure);

  /// How often the best can be run again in the time by which a budget may be exceeded, where
  /// `set_up_s` of it go for making the layer again.
  int explaining_rounds(double set_up_s) const;
  /// Runs the best candidates and the default `rounds` more times, in turns, and says what sets
  /// them apart. Nothing is said where passes have no figures of stages.
  void explain_best(const Measure& measure, int rounds);

  /// Stores what was found; to be called last.
  TuneOutcome finish();

 private:
  using Clock = std::chrono::steady_clock;

  /// What two passes of the default have told.
  struct FirstLook {
    std::int64_t differing = 0;
    double round_s = 0;   ///< a first round, as far as it is still to come
    double needed_s = 0;  ///< with what was spent ahead of it
  };

  FirstLook look_at_default(const Measure& measure) const;
  double spent() const;
  std::size_t left_of_a_round() const;
  Session begin(double round_s);
  void store_best();

  const TuneSubject subject_;
  const TuneSettings& settings_;
  const Clock::time_point start_;
  const Place place_;
  Space space_;
  std::string path_;                // of the session; empty: it is not kept
  std::vector<Schedule> known_;     // what a new search begins with
  std::optional<Session> session_;  // an earlier one, to be gone on with
  std::vector<std::string> problems_;
  Schedule base_;
  std::size_t modelled_ = 0;
  TuneOutcome out_;
};

}  // namespace uniep::tune
