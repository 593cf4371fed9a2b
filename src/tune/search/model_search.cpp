#include "tune/search/model_search.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <unordered_map>

#include "tune/model/parallel.h"

namespace uniep::tune {
namespace {

/// Predictions that are closer than this share are one to a tuner.
constexpr double kSame = 1e-4;

int axes_that_differ(const Schedule& a, const Schedule& b) {
  int count = 0;
  for (std::size_t i = 0; i < axes().size(); ++i) {
    count += axis_value(a, i) != axis_value(b, i) ? 1 : 0;
  }
  return count;
}

/// Remembers what was evaluated, and how much may still be.
class Evaluations {
 public:
  Evaluations(const std::function<double(const Schedule&)>& evaluate,
              const ModelSearchOptions& limits)
      : evaluate_(evaluate), left_(limits.evaluations), most_seconds_(limits.seconds) {}

  bool exhausted() const {
    const std::chrono::duration<double> spent = Clock::now() - begin_;
    return left_ <= 0 || spent.count() >= most_seconds_;
  }

  double operator()(const Schedule& schedule) {
    ask({schedule});
    return seconds_.at(to_string(schedule));
  }

  /// Evaluates those of the schedules that it does not know, as far as the limits go, but one at
  /// least; how many of them it then knows, from the first one on.
  std::size_t ask(const std::vector<Schedule>& schedules) {
    std::size_t known = 0;
    do {
      known = ask_side_by_side(schedules, known);
    } while (known < schedules.size() && !exhausted());
    return known;
  }

  /// Fastest first; among those that are the same, the one most like `base`.
  std::vector<Ranked> ranked(const Schedule& base) const {
    const auto rank = [&](const Ranked& r) {
      return std::pair(std::floor(std::log(r.seconds) / kSame), axes_that_differ(r.schedule, base));
    };
    std::vector<Ranked> sorted = ranked_;
    std::ranges::stable_sort(sorted, {}, rank);
    return sorted;
  }

 private:
  using Clock = std::chrono::steady_clock;

  /// Asks for unknown schedules from `first` on, so few that the clock is looked at often. Returns
  /// the first that was not looked at.
  std::size_t ask_side_by_side(const std::vector<Schedule>& schedules, std::size_t first) {
    const std::size_t most =
        std::min(static_cast<std::size_t>(std::max(left_, 1)), 2 * model_threads());
    std::vector<Ranked> asked;
    for (; first < schedules.size(); ++first) {
      const Schedule& s = schedules[first];
      if (seconds_.contains(to_string(s))) continue;
      if (asked.size() == most) break;
      seconds_[to_string(s)] = 0;
      asked.push_back({s, 0});
    }
    for_each_in_parallel(asked.size(),
                         [&](std::size_t i) { asked[i].seconds = evaluate_(asked[i].schedule); });
    for (const Ranked& r : asked) seconds_[to_string(r.schedule)] = r.seconds;
    ranked_.insert(ranked_.end(), asked.begin(), asked.end());
    left_ -= static_cast<int>(asked.size());
    return first;
  }

  const std::function<double(const Schedule&)>& evaluate_;
  int left_;
  const double most_seconds_;
  const Clock::time_point begin_ = Clock::now();
  std::unordered_map<std::string, double> seconds_;
  std::vector<Ranked> ranked_;
};

/// Walks from one point to the best of its neighbours, as long as that is better.
void climb(const Space& space, Ranked at, Evaluations& evaluate) {
  for (;;) {
    if (evaluate.exhausted()) return;
    Ranked best = at;
    std::vector<Schedule> neighbours = space.neighbours(at.schedule);
    neighbours.resize(evaluate.ask(neighbours));
    for (const Schedule& s : neighbours) {
      const double seconds = evaluate(s);
      if (seconds < best.seconds * (1 - kSame)) best = {s, seconds};
    }
    if (best.schedule == at.schedule) return;
    at = best;
  }
}

/// Puts axis after axis back to the value that `base` has, as long as the model sees no loss: what
/// it has no opinion of is left alone.
void simplify(const Space& space, const Schedule& base, Ranked at, Evaluations& evaluate) {
  const double limit = at.seconds * (1 + kSame);
  for (std::size_t i = 0; i < axes().size(); ++i) {
    if (evaluate.exhausted()) return;
    Schedule s = at.schedule;
    axes()[i].set(s, axis_value(base, i));
    s = space.canonical(s);
    if (s != at.schedule && space.allows(s) && evaluate(s) <= limit) at.schedule = s;
  }
}

}  // namespace

std::vector<Ranked> search_model(const Space& space, const std::vector<Schedule>& seeds,
                                 const std::function<double(const Schedule&)>& evaluate,
                                 const ModelSearchOptions& options) {
  Evaluations evaluations(evaluate, options);
  std::vector<Schedule> first;
  for (const Schedule& seed : seeds) first.push_back(space.canonical(seed));
  Space::Rng rng(options.seed);
  for (int i = 0; i < options.samples; ++i) first.push_back(space.sample(rng));
  evaluations.ask(first);
  const Schedule base = seeds.empty() ? Schedule{} : space.canonical(seeds.front());
  const std::vector<Ranked> starts = evaluations.ranked(base);
  for (std::size_t i = 0; i < starts.size() && i < static_cast<std::size_t>(options.climbs); ++i) {
    climb(space, starts[i], evaluations);
  }
  if (seeds.empty()) return evaluations.ranked(base);
  const std::vector<Ranked> found = evaluations.ranked(base);
  for (std::size_t i = 0; i < found.size() && i < static_cast<std::size_t>(options.simplified);
       ++i) {
    simplify(space, base, found[i], evaluations);
  }
  return evaluations.ranked(base);
}

std::vector<Ranked> distinct(const std::vector<Ranked>& ranked, std::size_t count) {
  constexpr int kAlike = 3;
  constexpr double kClose = 0.01;
  std::vector<Ranked> chosen;
  for (const Ranked& r : ranked) {
    if (chosen.size() == count) break;
    const bool twin = std::ranges::any_of(chosen, [&](const Ranked& c) {
      return std::abs(c.seconds - r.seconds) <= kClose * c.seconds &&
             axes_that_differ(c.schedule, r.schedule) <= kAlike;
    });
    if (!twin) chosen.push_back(r);
  }
  return chosen;
}

}  // namespace uniep::tune
