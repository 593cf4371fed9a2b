#pragma once

#include <memory>
#include <vector>

#include "schedule/dependencies.h"
#include "schedule/pass_order.h"
#include "support/random_routing.h"

namespace uniep::testing {

/// One pass on every rank: plans, a schedule that all share, and what follows from them.
struct RandomPass {
  Routing routing;
  Schedule schedule;
  Pass pass = Pass::kForward;
  PassPart part = PassPart::kWhole;
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
    p.orders.push_back(std::make_unique<PassOrder>(plan.data(), p.pass, p.schedule, p.part));
  }
}

inline RandomPass random_pass(unsigned seed, std::int64_t most_tokens, int max_workers = 4) {
  Rng rng(seed);
  RandomPass p;
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

/// The tasks of a queue by plain enumeration.
inline std::vector<Task> tasks_of(const PassView& v, const TrackList& tracks) {
  std::vector<Task> tasks;
  for_each_block(tracks, [&](Stage stage, int block) {
    const std::int64_t count = block_tasks(v, stage, block);
    for (std::int64_t i = 0; i < count; ++i) tasks.push_back(block_task(v, stage, block, i));
  });
  return tasks;
}

}  // namespace uniep::testing
