#pragma once

#include <string>
#include <vector>

#include "tune/model/cost_model.h"
#include "workload/synthetic.h"

namespace uniep::testing {

/// Plans of a shape (as `--shape` reads it) under its made-up routing, with room for any, of the
/// ranks that are simulated where there are `ranks`.
inline std::vector<RoutingPlan> plans_of_shape(const std::string& shape, int ranks, double skew = 0,
                                               int most_ranks = tune::kMostSimulatedRanks) {
  const workload::ShapeSpec spec = workload::parse_shape(shape);
  const workload::Routing routing = workload::make_routing(spec, ranks, 0, skew);
  Problem problem = workload::problem_of(spec);
  problem.capacity_rows = rows_of_any_routing(problem, ranks);
  const std::vector<std::int64_t> tokens(static_cast<std::size_t>(ranks), spec.tokens);
  return tune::plans_to_simulate(problem, tokens, routing.topk_ids, most_ranks);
}

}  // namespace uniep::testing
