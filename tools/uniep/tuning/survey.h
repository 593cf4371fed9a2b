#pragma once

#include "tuning/tuner.h"

namespace uniep::tool {

/// A point of the space, as predicted and as measured.
struct SurveyPoint {
  Schedule schedule;
  double predicted_s = 0;
  double measured_s = 0;  ///< the least of its passes: what else runs on the machine only adds
};

/// How well predictions agree with measurements.
struct Agreement {
  double rank_correlation = 0;  ///< Spearman's
  double median_error = 0;      ///< of |predicted / measured - 1|
  double p90_error = 0;
  /// What the measured best is, over what the point is that the model holds for the best.
  double pick = 0;
};
Agreement agreement_of(const std::vector<SurveyPoint>& points);

struct SurveySize {
  int points = 100;
  int rounds = 15;
};

/// What was measured of a direction. `interrupted` is set on all processes.
struct SurveyOfPass {
  Pass pass = Pass::kForward;
  std::vector<SurveyPoint> points{};
  std::size_t passes = 0, wanted = 0;  ///< measured, and of how many
  bool interrupted = false;
};

/// Measures random points of the space, or all where there are no more than asked for, each once a
/// round, and predicts them. Ends where `settings.watch` says so, with the points that were
/// measured. `measured` is called on the leading rank after each pass, with how many there were and
/// will be. Collective; the points are those of the process that speaks.
SurveyOfPass survey_pass(const BenchCase& bench, Pass pass, const SurveySize& size,
                         const tune::TuneSettings& settings, const Ranks& ranks,
                         const std::function<void(std::size_t, std::size_t)>& measured);

}  // namespace uniep::tool
