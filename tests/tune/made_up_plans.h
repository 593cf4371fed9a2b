#pragma once

#include <string>
#include <vector>

#include "tune/cost_model.h"
#include "workload/synthetic.h"

namespace uniep::testing {

/// Plans of a shape (as `--shape` reads it) under its made-up routing, with room for any, of the
/// ranks that are simulated where there are `ranks`.
inline std::vector<RoutingPlan> made_up_plans(const std::string& shape, int ranks, double skew = 0,
                                              int most_ranks = tune::kMostSimulatedRanks) {
  const workload::ShapeSpec spec = workload::parse_shape(shape);
  const workload::Routing routing = workload::make_routing(spec, ranks, 0, skew);
  const std::int64_t padding = spec.num_experts * Problem{}.row_align;
  const Problem problem = workload::problem_of(spec, ranks * spec.tokens * spec.topk + padding);
  const std::vector<std::int64_t> tokens(static_cast<std::size_t>(ranks), spec.tokens);
  return tune::plans_to_simulate(problem, tokens, routing.topk_ids, most_ranks);
}

}  // namespace uniep::testing
