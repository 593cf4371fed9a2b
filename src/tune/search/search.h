#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>

#include "tune/search/measurement.h"
#include "tune/search/race.h"
#include "tune/search/session.h"
#include "tune/search/tune_outcome.h"
#include "tune/search/tune_settings.h"

namespace uniep::tune {

/// Measures the candidates of a session until the fastest is known. Runs on the rank that leads.
class Search {
 public:
  using Clock = std::chrono::steady_clock;

  /// `path` is where the session is kept, empty: nowhere; `differing`: elements with wrong bits in
  /// the passes of the first candidate so far; `start`: when the budget began.
  Search(Session session, std::string path, const TuneSettings& settings, Clock::time_point start,
         std::int64_t differing);

  void run(const Measure& run_pass);
  TuneOutcome outcome() const;

 private:
  /// Puts the measurements of an earlier session where they were made: the order of a race follows
  /// from its seed and what was recorded.
  void replay();
  void measure(const Measure& run_pass, std::size_t candidate);
  std::optional<TuneEnd> reason_to_end() const;
  TuneState state() const;
  void save();

  Session session_;
  const std::string path_;
  const TuneSettings& settings_;
  const Clock::time_point start_;
  std::int64_t differing_before_;
  Race race_;
  std::size_t resumed_ = 0;
  std::size_t measurements_ = 0;
  TuneEnd end_ = TuneEnd::kDecided;
  std::string save_problem_;
  Clock::time_point saved_ = Clock::now();
};

}  // namespace uniep::tune
