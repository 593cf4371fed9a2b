#pragma once

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "base/check.h"
#include "plan/routing.h"
#include "support/random_case.h"
#include "uniep/routing_plan.h"

namespace uniep::testing {

/// The all-gathered routing of one batch, without any tensors.
struct Routing {
  Problem problem;
  std::vector<std::int64_t> tokens;  // by rank
  std::vector<std::int32_t> ids;     // [sum of tokens, K]
  int hosts = 1;                     // that the ranks are on

  int ranks() const { return static_cast<int>(tokens.size()); }
  RoutingPlan plan(int rank) const {
    if (hosts == 1) return RoutingPlan::build(problem, rank, tokens, ids);
    const uniep::Routing all{tokens, ids, hosts};
    return make_plan(problem, rank, all, check_routing(problem, all));
  }
};

inline std::string describe(const Routing& r) {
  std::string text = to_string(r.problem) + ", tokens";
  for (const auto t : r.tokens) text += cat(" ", t);
  return text;
}

inline Problem random_problem(Rng& rng, int ranks, std::int64_t most_tokens) {
  Problem p;
  p.hidden = 8 * pick(rng, 1, 40);
  p.intermediate = 8 * pick(rng, 1, 40);
  p.num_experts = ranks * static_cast<int>(pick(rng, 1, 5));
  p.topk = static_cast<int>(chance(rng, 70) ? pick(rng, 1, 4) : pick(rng, 1, kMaxTopk));
  p.max_tokens = pick(rng, 0, most_tokens);
  p.row_align = 16 << pick(rng, 0, 4);
  return p;
}

/// Experts of a problem that every rank has, if it may have some, now and then.
inline void draw_shared_experts(Rng& rng, Problem& p) {
  const int most = std::min(3, kMaxTopk - p.topk);
  if (most == 0 || !chance(rng, 40)) return;
  p.shared_experts = static_cast<int>(pick(rng, 1, most));
  p.shared_gate = chance(rng, 50);
}

/// Tokens of several hosts, most of which come in waves.
inline void draw_gathered_hosts(Rng& rng, Problem& p) {
  p.gathered_hosts = static_cast<int>(pick(rng, 2, 4));
  p.first_host = static_cast<int>(pick(rng, -1, p.gathered_hosts - 1));
  p.max_tokens = p.max_tokens / p.gathered_hosts * p.gathered_hosts;
}

/// Ranks hold different numbers of tokens, some none; slots are dropped; tokens name an expert
/// twice; experts get nothing or everything.
inline Routing random_routing(Rng& rng, const Problem& p, int ranks) {
  Routing r;
  r.problem = p;
  for (int i = 0; i < ranks; ++i) {
    r.tokens.push_back(chance(rng, 20) ? 0 : pick(rng, 0, p.max_tokens));
  }
  const std::int64_t total = std::accumulate(r.tokens.begin(), r.tokens.end(), std::int64_t{0});
  const auto dropped_percent = static_cast<int>(chance(rng, 40) ? pick(rng, 1, 100) : 0);
  const std::int64_t used =
      chance(rng, 10) ? 1 : (chance(rng, 30) ? pick(rng, 1, p.num_experts) : p.num_experts);
  const std::int64_t first = pick(rng, 0, p.num_experts - used);
  const bool repeat_in_token = chance(rng, 20);
  for (std::int64_t i = 0; i < total * p.topk; ++i) {
    if (chance(rng, dropped_percent)) {
      r.ids.push_back(-1);
    } else if (repeat_in_token && i % p.topk > 0) {
      r.ids.push_back(r.ids.back());
    } else {
      r.ids.push_back(static_cast<std::int32_t>(first + pick(rng, 0, used - 1)));
    }
  }
  return r;
}

inline Routing random_routing(Rng& rng, std::int64_t most_tokens) {
  const int ranks = static_cast<int>(pick(rng, 1, 8));
  Problem problem = random_problem(rng, ranks, most_tokens);
  if (chance(rng, 20)) draw_gathered_hosts(rng, problem);
  return random_routing(rng, problem, ranks);
}

}  // namespace uniep::testing
