#include "survey.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/check.h"
#include "base/quantile.h"
#include "interrupt.h"
#include "trace/panels.h"
#include "tune/cost_model.h"
#include "tune/parallel.h"
#include "tune/tune_key.h"
#include "tune_rank.h"

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
  for (int tries = 0; tries < 100 * count && static_cast<int>(points.size()) < count; ++tries) {
    const Schedule s = space.sample(rng);
    const bool is_new = std::ranges::find(points, s, &SurveyPoint::schedule) == points.end();
    if (is_new) points.push_back({.schedule = s});
  }
  return points;
}

void measure(std::vector<SurveyPoint>& points, int rounds, TuneRank& rank) {
  std::vector<std::size_t> order(points.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::mt19937_64 rng(1);
  for (int round = 0; round <= rounds && !Interrupt::requested(); ++round) {
    std::ranges::shuffle(order, rng);
    for (const std::size_t i : order) {
      const TuneRank::Measurement m = rank.measure(points[i].schedule);
      ensure(m.differing == 0, "schedule ", to_string(points[i].schedule), " gave wrong bits");
      double& least = points[i].measured_s;
      if (round == 1 || (round > 1 && m.seconds < least)) least = m.seconds;  // 0 warms up
    }
  }
  std::erase_if(points, [](const SurveyPoint& p) { return p.measured_s == 0; });
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

std::vector<SurveyPoint> survey_pass(const BenchCase& bench, Pass pass, const SurveySize& size,
                                     const TuneSettings& settings, const Ranks& ranks,
                                     bool& interrupted) {
  require(settings.profile.has_value(), ErrorCode::kInvalidArgument,
          "a survey compares the model with measurements and needs a profile; --profile FILE|NAME "
          "is accepted");
  Space space(bench.problem, pass, tune::this_place(ranks.backend));
  space.restrict_to(settings.restriction);
  std::vector<SurveyPoint> points = points_of(space, size.points, settings.seed);
  const std::vector<std::int64_t> tokens(static_cast<std::size_t>(bench.ranks), bench.spec.tokens);
  const auto plans = tune::plans_to_simulate(bench.problem, tokens, bench.routing.topk_ids);
  tune::for_each_in_parallel(points.size(), [&](std::size_t i) {
    SurveyPoint& p = points[i];
    p.predicted_s = tune::simulate(plans, pass, p.schedule, *settings.profile).seconds;
  });
  const Schedule baseline = parse_schedule("sequential", default_schedule(ranks.backend));
  ranks.run([&](Communicator& member, BenchDevice& device) {
    TuneRank rank(bench, pass, member, device, baseline);
    if (member.rank() != 0) {
      const bool ended = rank.follow();
      if (!ranks.speaks) interrupted = ended;
      return;
    }
    measure(points, size.rounds, rank);
    interrupted = Interrupt::requested();
    rank.finish(interrupted);
  });
  return points;
}

std::string draw_survey(const std::string& title, const std::vector<std::string>& notes,
                        const std::vector<SurveyPoint>& points) {
  constexpr double kSide = 520;
  trace::Svg svg;
  svg.text(trace::kMarginLeft, 34, title, {20, trace::kTextColor, trace::Anchor::kStart, true});
  double top = 54;
  for (const std::string& note : notes) {
    svg.text(trace::kMarginLeft, top, note, {12, trace::kMutedColor});
    top += 16;
  }
  top += 20;
  double slowest = 0;
  for (const SurveyPoint& p : points) {
    slowest = std::max({slowest, 1e3 * p.predicted_s, 1e3 * p.measured_s});
  }
  const double end = trace::axis_end(slowest);
  const double left = trace::kMarginLeft, bottom = top + kSide;
  trace::draw_y_axis(svg, left, left + kSide, top, bottom, end, "predicted, ms");
  const double step = trace::tick_step(end, 5);
  for (int i = 0; i * step <= end * (1 + 1e-9); ++i) {
    svg.text(left + kSide * i * step / end, bottom + 16, trace::short_number(i * step),
             {11, trace::kMutedColor, trace::Anchor::kMiddle});
  }
  svg.text(left + kSide / 2, bottom + 36, "measured, ms",
           {12, trace::kMutedColor, trace::Anchor::kMiddle});
  svg.line(left, bottom, left + kSide, top, trace::kAxisColor, 1, true);
  for (const SurveyPoint& p : points) {
    svg.rect(left + kSide * 1e3 * p.measured_s / end - 2,
             bottom - kSide * 1e3 * p.predicted_s / end - 2, 4, 4, "#1f5fa8",
             to_string(p.schedule));
  }
  return svg.document(2 * trace::kMarginLeft + kSide, bottom + 56, title);
}

}  // namespace uniep::tool
