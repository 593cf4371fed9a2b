#pragma once

#include "tuner.h"

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

/// Measures random points of the space, or all where there are no more than asked for, each once a
/// round, and predicts them. Collective; the result is that of the process that speaks.
/// `interrupted` is set on all where the search was.
std::vector<SurveyPoint> survey_pass(const BenchCase& bench, Pass pass, const SurveySize& size,
                                     const TuneSettings& settings, const Ranks& ranks,
                                     bool& interrupted);

/// One SVG document: a dot a point, predicted over measured.
std::string draw_survey(const std::string& title, const std::vector<std::string>& notes,
                        const std::vector<SurveyPoint>& points);

}  // namespace uniep::tool
