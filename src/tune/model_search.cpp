#include "tune/model_search.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <unordered_map>

#include "tune/cost_model.h"

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
  Evaluations(const std::function<double(const Schedule&)>& evaluate, int limit)
      : evaluate_(evaluate), left_(limit) {}

  bool exhausted() const { return left_ <= 0; }

  double operator()(const Schedule& schedule) {
    const auto [known, is_new] = seconds_.try_emplace(to_string(schedule), 0);
    if (!is_new) return known->second;
    --left_;
    known->second = evaluate_(schedule);
    ranked_.push_back({schedule, known->second});
    return known->second;
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
  const std::function<double(const Schedule&)>& evaluate_;
  int left_;
  std::unordered_map<std::string, double> seconds_;
  std::vector<Ranked> ranked_;
};

/// From one point to the best of its neighbours, as long as that is better.
void climb(const Space& space, Ranked at, Evaluations& evaluate) {
  for (;;) {
    Ranked best = at;
    for (const Schedule& s : space.neighbours(at.schedule)) {
      if (evaluate.exhausted()) return;
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
  Evaluations evaluations(evaluate, options.evaluations);
  for (const Schedule& seed : seeds) evaluations(space.canonical(seed));
  Space::Rng rng(options.seed);
  for (int i = 0; i < options.samples && !evaluations.exhausted(); ++i) {
    evaluations(space.sample(rng));
  }
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

std::vector<std::int32_t> sampled_routing(const Problem& problem, int ranks, std::int64_t tokens,
                                          double skew, std::uint64_t seed) {
  std::vector<double> cumulative;
  double sum = 0;
  for (int e = 0; e < problem.num_experts; ++e) {
    sum += std::pow(1.0 + e, -skew);
    cumulative.push_back(sum);
  }
  std::mt19937_64 rng(seed);
  std::vector<std::int32_t> ids;
  ids.reserve(static_cast<std::size_t>(tokens * ranks * problem.topk));
  for (std::int64_t t = 0; t < tokens * ranks; ++t) {
    const auto first = ids.end() - ids.begin();
    while (ids.end() - ids.begin() - first < problem.topk) {
      const double at = sum * static_cast<double>(rng() >> 11) * 0x1p-53;
      const auto found = std::ranges::upper_bound(cumulative, at);
      const auto e = static_cast<std::int32_t>(
          std::min<std::ptrdiff_t>(found - cumulative.begin(), problem.num_experts - 1));
      if (std::find(ids.begin() + first, ids.end(), e) == ids.end()) ids.push_back(e);
    }
  }
  return ids;
}

Schedule quick_pick(const Problem& problem, const TuneKey& key, const Place& place,
                    const MachineProfile& profile) {
  Problem p = problem;
  p.capacity_rows = 0;  // of a routing that is made up here
  p.max_tokens = std::max(p.max_tokens, key.tokens);
  const std::vector<std::int64_t> tokens(static_cast<std::size_t>(key.ranks), key.tokens);
  const auto ids = sampled_routing(p, key.ranks, key.tokens, key.skew, 1);
  // Where workers have cores of their own, one rank says enough.
  const auto plans =
      plans_to_simulate(p, tokens, ids, profile.cores == 0 ? 1 : kMostSimulatedRanks);
  const Space space(p, key.pass, place);
  const Schedule base = default_schedule(key.backend);
  std::vector<Schedule> candidates{base};
  for (const char* preset : {"sequential", "pipelined:2", "two-kernel"}) {
    candidates.push_back(parse_schedule(preset, base));
  }
  for (const Schedule& s : space.neighbours(space.canonical(base))) candidates.push_back(s);
  Ranked best{base, -1};
  for (const Schedule& s : candidates) {
    if (invalid_reason(s, problem, place)) continue;
    const double seconds = simulate(plans, key.pass, s, profile).seconds;
    if (best.seconds < 0 || seconds < best.seconds) best = {s, seconds};
  }
  return best.schedule;
}

}  // namespace uniep::tune
