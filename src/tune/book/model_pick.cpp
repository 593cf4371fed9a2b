#include "tune/book/model_pick.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "plan/routing.h"
#include "plan/routing_fault.h"
#include "schedule/space.h"
#include "tune/model/cost_model.h"
#include "tune/model/parallel.h"

namespace uniep::tune {

namespace {

/// Draws the experts of one token after another.
class Router {
 public:
  Router(const Problem& problem, double skew, std::uint64_t seed)
      : topk_(problem.topk), rng_(seed) {
    double sum = 0;
    for (int e = 0; e < problem.num_experts; ++e) {
      sum += std::pow(1.0 + e, -skew);
      cumulative_.push_back(sum);
    }
  }

  void append_token(std::vector<std::int32_t>& ids) {
    const auto first = ids.end() - ids.begin();
    const auto is_taken = [&](std::int32_t e) {
      return std::find(ids.begin() + first, ids.end(), e) != ids.end();
    };
    for (int k = 0; k < topk_; ++k) {
      std::int32_t e = draw();
      for (int tries = 1; is_taken(e) && tries < kTries; ++tries) e = draw();
      // If a few experts take nearly all tokens, these were all drawn: the next one follows.
      for (int next = 0; is_taken(e) && next < experts(); ++next) e = next;
      ids.push_back(e);
    }
  }

 private:
  static constexpr int kTries = 100;

  std::int32_t experts() const { return static_cast<std::int32_t>(cumulative_.size()); }

  std::int32_t draw() {
    const double at = cumulative_.back() * static_cast<double>(rng_() >> 11) * 0x1p-53;
    const auto found = std::ranges::upper_bound(cumulative_, at);
    return std::min(static_cast<std::int32_t>(found - cumulative_.begin()), experts() - 1);
  }

  const int topk_;
  std::vector<double> cumulative_;
  std::mt19937_64 rng_;
};

}  // namespace

std::vector<std::int32_t> sampled_routing(const Problem& problem, int ranks, std::int64_t tokens,
                                          double skew, std::uint64_t seed) {
  Problem of_all_hosts = problem;
  of_all_hosts.num_experts *= problem.gathered_hosts;
  Router router(of_all_hosts, skew, seed);
  std::vector<std::int32_t> ids;
  ids.reserve(static_cast<std::size_t>(tokens * ranks * problem.topk));
  for (std::int64_t t = 0; t < tokens * ranks; ++t) router.append_token(ids);
  for (std::int32_t& id : ids) id = id < problem.num_experts ? id : -1;
  return ids;
}

namespace {

/// Rows of a rank beyond which a pick waits for seconds and another tells no more.
constexpr std::int64_t kMostRows = 1 << 17;

/// Plans of a routing that is made up for the key.
std::vector<RoutingPlan> made_up_plans(Problem p, const TuneKey& key) {
  p.max_tokens = std::min(key.tokens, kMostRows / p.topk);
  p.max_tokens -= p.max_tokens % p.gathered_hosts;
  p.capacity_rows = rows_of_any_routing(p, key.ranks);
  const std::vector<std::int64_t> tokens(static_cast<std::size_t>(key.ranks), p.max_tokens);
  const auto ids = sampled_routing(p, key.ranks, p.max_tokens, key.skew, 1);
  // As if a ring were larger: real tokens may be fewer than those of the key.
  const RoutingCheck check = check_routing(p, {tokens, ids});
  if (check.fault.kind == RoutingFault::Kind::kExpertRows) {
    p.backward_rows = overflow_amount(check, p);
  }
  return plans_to_simulate(p, tokens, ids);
}

/// The model is 4 % off on average (docs/tuning.md): what it takes to be faster than the default by
/// less may well be slower, and the default was chosen by measurements.
constexpr double kDoubt = 0.04;

/// What is weighed against the default, beside its neighbours. When little comes over the wire,
/// dispatch is a copy within the GPU, for which more workers were found to pay, with smaller tasks.
/// When tokens are few, a token seldom has two rows on a rank, and weight gradients, all of them
/// output, hold up what others wait for.
constexpr const char* kRivals[] = {"sequential",
                                   "pipelined:2",
                                   "two-kernel",
                                   "dispatch_workers=32,pull_tokens=4",
                                   "dispatch_workers=64,pull_tokens=4",
                                   "dispatch_wire=rows,wgrad=after"};

std::vector<Schedule> candidates(const Space& space, const Schedule& base) {
  std::vector<Schedule> all;
  for (const char* text : kRivals) all.push_back(space.canonical(parse_schedule(text, base)));
  for (const Schedule& s : space.neighbours(space.canonical(base))) all.push_back(s);
  return all;
}

}  // namespace

Schedule quick_pick(const Problem& problem, const TuneKey& key, const Place& place,
                    const MachineProfile& profile) {
  const auto plans = made_up_plans(problem, key);
  const Space space(problem, key.pass, place);
  const auto predicted = [&](const Schedule& s) {
    if (invalid_reason(s, problem, place)) return std::numeric_limits<double>::infinity();
    return simulate(plans, key.pass, s, profile).seconds;
  };
  const Schedule base = default_schedule_for(problem, place);
  std::vector<Schedule> all = candidates(space, base);
  all.insert(all.begin(), base);
  std::vector<double> seconds(all.size());
  for_each_in_parallel(all.size(), [&](std::size_t i) { seconds[i] = predicted(all[i]); });
  seconds[0] *= 1 - kDoubt;
  return all[static_cast<std::size_t>(std::ranges::min_element(seconds) - seconds.begin())];
}

}  // namespace uniep::tune
