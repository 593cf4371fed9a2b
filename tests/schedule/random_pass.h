#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

#include "schedule/dependencies.h"
#include "schedule/pass_order.h"
#include "schedule/queue.h"
#include "schedule/tasks_of_block.h"
#include "support/cases.h"
#include "support/random_routing.h"

namespace uniep::testing {

/// One pass on every rank: plans, a schedule that all share, and what follows from them.
struct RandomPass {
  Routing routing;
  Schedule schedule;
  Pass pass = Pass::kForward;
  PassPart part = PassPart::kWhole;
  const Graph* graph = &kLayerGraph;
  std::vector<RoutingPlan> plans;
  std::vector<std::unique_ptr<PassOrder>> orders;  // by rank

  const PassView& view(int rank) const { return orders[static_cast<std::size_t>(rank)]->view(); }
  int ranks() const { return routing.ranks(); }
};

inline void build_orders(RandomPass& p) {
  p.plans.clear();
  p.orders.clear();
  for (int rank = 0; rank < p.ranks(); ++rank) p.plans.push_back(p.routing.plan(rank));
  for (const RoutingPlan& plan : p.plans) {
    p.orders.push_back(
        std::make_unique<PassOrder>(plan.data(), p.pass, p.schedule, p.part, *p.graph));
  }
}

inline RandomPass random_pass(unsigned seed, std::int64_t most_tokens, int max_workers = 4,
                              const Graph& graph = kLayerGraph) {
  Rng rng(seed);
  RandomPass p;
  p.graph = &graph;
  p.routing = random_routing(rng, most_tokens);
  p.schedule = random_schedule(rng, p.routing.problem, max_workers);
  p.pass = chance(rng, 60) ? Pass::kBackward : Pass::kForward;
  if (p.pass == Pass::kBackward && chance(rng, 40)) {
    p.part = chance(rng, 50) ? PassPart::kData : PassPart::kWeights;
  }
  build_orders(p);
  return p;
}

inline std::string describe(unsigned seed, const RandomPass& p) {
  constexpr const char* kParts[] = {"", " (data)", " (weights)"};
  return cat("seed ", seed, ", ", name(p.pass), kParts[static_cast<int>(p.part)], ", ",
             describe(p.routing), "\n  ", to_string(p.schedule));
}

/// check(plan, view) of every rank of `cases(count)` random passes, until a check fails fatally.
template <class Check>
void for_each_rank_of_random_passes(int count, std::int64_t most_tokens, Check&& check) {
  for (unsigned seed = 1; seed <= static_cast<unsigned>(cases(count)); ++seed) {
    const RandomPass p = random_pass(seed, most_tokens);
    SCOPED_TRACE(describe(seed, p));
    for (int rank = 0; rank < p.ranks(); ++rank) {
      check(p.plans[static_cast<std::size_t>(rank)], p.view(rank));
      if (::testing::Test::HasFatalFailure()) return;
    }
  }
}

/// Known here apart from the graph.
inline Stage first_product(const PassView& v) {
  return v.pass == Pass::kForward ? Stage::kFc1 : Stage::kDfc2;
}
inline Stage second_product(const PassView& v) {
  return v.pass == Pass::kForward ? Stage::kFc2 : Stage::kDfc1;
}

/// The tasks of blocks that are mixed: those of the first go where they are due, in runs, the
/// others to the places left.
inline std::vector<Task> deal(const std::vector<Task>& own, const std::vector<Task>& others,
                              std::size_t run) {
  std::vector<std::optional<Task>> places(own.size() + others.size());
  for (std::size_t begin = 0; begin < own.size(); begin += run) {
    const std::size_t end = std::min(begin + run, own.size());
    const std::size_t place = ceil_div(end * places.size(), own.size());
    for (std::size_t i = begin; i < end; ++i) places.at(place - (end - i)) = own[i];
  }
  std::vector<Task> dealt;
  std::size_t taken = 0;
  for (const std::optional<Task>& task : places) {
    dealt.push_back(task ? *task : others.at(taken++));
  }
  return dealt;
}

/// The tasks of a queue by plain enumeration.
inline std::vector<Task> tasks_of(const PassView& v, const TrackList& tracks) {
  std::vector<Task> tasks, own, others;
  for_each_block(v, tracks, [&](const QueueBlock& b) {
    const bool mixes = b.mix.any();
    std::vector<Task>& dealt = b.mix.is_first() ? own : others;
    std::vector<Task>& to = mixes ? dealt : tasks;
    const std::vector<Task> of_block = tasks_of_block(v, b.stage, b.block);
    to.insert(to.end(), of_block.begin(), of_block.end());
    if (!mixes || !b.mix.is_last()) return;
    const std::vector<Task> mixed = deal(own, others, static_cast<std::size_t>(v.schedule.mix_run));
    tasks.insert(tasks.end(), mixed.begin(), mixed.end());
    own.clear();
    others.clear();
  });
  return tasks;
}

}  // namespace uniep::testing
