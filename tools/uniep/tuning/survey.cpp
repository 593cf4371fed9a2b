#include "tuning/survey.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <unordered_set>

#include "base/check.h"
#include "base/quantile.h"
#include "tune/book/tune_key.h"
#include "tune/model/cost_model.h"
#include "tune/model/parallel.h"
#include "tuning/tune_rank.h"

namespace uniep::tool {
namespace {

/// Places of the values when sorted; equal values share the mean of theirs.
std::vector<double> places_of(const std::vector<double>& values) {
  std::vector<std::size_t> order(values.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::sort(order, {}, [&](std::size_t i) { return values[i]; });
  std::vector<double> places(values.size());
  for (std::size_t i = 0; i < order.size();) {
    std::size_t end = i;
    while (end < order.size() && values[order[end]] == values[order[i]]) ++end;
    const double mean = (static_cast<double>(i) + static_cast<double>(end - 1)) / 2;
    for (; i < end; ++i) places[order[i]] = mean;
  }
  return places;
}

double correlation(const std::vector<double>& a, const std::vector<double>& b) {
  const auto n = static_cast<double>(a.size());
  const double mean_a = std::accumulate(a.begin(), a.end(), 0.0) / n;
  const double mean_b = std::accumulate(b.begin(), b.end(), 0.0) / n;
  double ab = 0, aa = 0, bb = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    ab += (a[i] - mean_a) * (b[i] - mean_b);
    aa += (a[i] - mean_a) * (a[i] - mean_a);
    bb += (b[i] - mean_b) * (b[i] - mean_b);
  }
  return aa > 0 && bb > 0 ? ab / std::sqrt(aa * bb) : 0;
}

/// More combinations are not looked through for how many points they are.
constexpr double kFewCombinations = 1e6;

/// All points of the space where there are no more than `count`, else so many random ones.
std::vector<SurveyPoint> points_of(const Space& space, int count, std::uint64_t seed) {
  std::vector<SurveyPoint> points;
  if (space.combinations() <= kFewCombinations && space.size() <= count) {
    space.for_each([&](const Schedule& s) { points.push_back({.schedule = s}); });
    return points;
  }
  Space::Rng rng(seed);
  std::unordered_set<std::string> known;
  for (int tries = 0; tries < 100 * count && static_cast<int>(points.size()) < count; ++tries) {
    const Schedule s = space.sample(rng);
    if (known.insert(to_string(s)).second) points.push_back({.schedule = s});
  }
  return points;
}

using Measured = std::function<void(std::size_t, std::size_t)>;

void measure(SurveyOfPass& survey, int rounds, const tune::TuneWatch& watch,
             const Measured& measured, TuneRank& rank) {
  std::vector<SurveyPoint>& points = survey.points;
  std::vector<std::size_t> order(points.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  survey.wanted = points.size() * (static_cast<std::size_t>(rounds) + 1);
  std::mt19937_64 rng(1);
  for (int round = 0; round <= rounds; ++round) {
    std::ranges::shuffle(order, rng);
    for (const std::size_t i : order) {
      survey.interrupted = watch.stop();
      if (survey.interrupted) return;
      const tune::Measurement m = rank.measure(points[i].schedule);
      ensure(m.differing == 0, "schedule ", to_string(points[i].schedule), " gave wrong bits");
      double& least = points[i].measured_s;
      if (round > 0 && (least == 0 || m.seconds < least)) least = m.seconds;  // 0 warms up
      measured(++survey.passes, survey.wanted);
    }
  }
}

/// Points with what the model says of them.
std::vector<SurveyPoint> predicted_points(const BenchCase& bench, Pass pass, int count,
                                          const tune::TuneSettings& settings, Backend backend) {
  Space space(bench.problem, pass, tune::this_place(backend));
  space.restrict_to(settings.restriction);
  std::vector<SurveyPoint> points = points_of(space, count, settings.seed);
  const auto plans =
      tune::plans_to_simulate(bench.problem, bench.tokens_per_rank(), bench.routing.topk_ids,
                              tune::kMostSimulatedRanks, bench.hosts);
  tune::for_each_in_parallel(points.size(), [&](std::size_t i) {
    SurveyPoint& p = points[i];
    p.predicted_s =
        tune::simulate(plans, pass, p.schedule, *settings.profile, {.topology = settings.topology})
            .seconds;
  });
  return points;
}

}  // namespace

Agreement agreement_of(const std::vector<SurveyPoint>& points) {
  if (points.empty()) return {};
  std::vector<double> predicted, measured, errors;
  for (const SurveyPoint& p : points) {
    predicted.push_back(p.predicted_s);
    measured.push_back(p.measured_s);
    errors.push_back(std::abs(p.predicted_s / p.measured_s - 1));
  }
  const auto pick = std::ranges::min_element(points, {}, &SurveyPoint::predicted_s);
  return {.rank_correlation = correlation(places_of(predicted), places_of(measured)),
          .median_error = median(errors),
          .p90_error = quantile(errors, 0.9),
          .pick = std::ranges::min(measured) / pick->measured_s};
}

SurveyOfPass survey_pass(const BenchCase& bench, Pass pass, const SurveySize& size,
                         const tune::TuneSettings& settings, const Ranks& ranks,
                         const std::function<void(std::size_t, std::size_t)>& measured) {
  ensure(settings.profile.has_value(), "a survey without a profile");
  SurveyOfPass survey{.pass = pass};
  survey.points = predicted_points(bench, pass, size.points, settings, ranks.backend);
  const Schedule baseline = parse_schedule("sequential", default_schedule(ranks.backend));
  ranks.run([&](Communicator& member, BenchDevice& device) {
    TuneRank rank(bench, pass, member, device, baseline);
    if (member.rank() != 0) {
      const bool ended = rank.follow();
      if (!ranks.speaks) survey.interrupted = ended;
      return;
    }
    measure(survey, size.rounds, settings.watch, measured, rank);
    rank.finish(survey.interrupted);
  });
  std::erase_if(survey.points, [](const SurveyPoint& p) { return p.measured_s == 0; });
  return survey;
}

}  // namespace uniep::tool
