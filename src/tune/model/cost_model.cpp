#include "tune/model/cost_model.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "plan/routing.h"
#include "plan/routing_fault.h"

namespace uniep::tune {

int fullest_part(const Problem& problem, int parts, std::span<const std::int32_t> topk_ids) {
  std::vector<std::int64_t> rows(static_cast<std::size_t>(parts));
  const int local = problem.num_experts / parts;
  for (const std::int32_t e : topk_ids) {
    if (e >= 0 && e < problem.num_experts) ++rows[static_cast<std::size_t>(e / local)];
  }
  return static_cast<int>(std::ranges::max_element(rows) - rows.begin());
}

std::vector<RoutingPlan> plans_to_simulate(const Problem& problem,
                                           std::span<const std::int64_t> tokens_per_rank,
                                           std::span<const std::int32_t> topk_ids, int most_ranks,
                                           int hosts) {
  const int ranks = static_cast<int>(tokens_per_rank.size());
  validate(problem, ranks);
  const RankLayout layout = layout_of_hosts(ranks, hosts);
  int first = 0, count = ranks;
  if (ranks > most_ranks) {
    const int fullest = fullest_part(problem, ranks, topk_ids);
    first = hosts == 1 ? fullest : layout.rank_at(layout.host_of(fullest), 0);
    count = hosts == 1 ? 1 : layout.local_ranks;
  }
  const Routing routing{tokens_per_rank, topk_ids, hosts};
  const RoutingCheck check = check_routing(problem, routing);
  throw_if_any(check.fault, problem, ranks);  // its plans would have no rows
  std::vector<RoutingPlan> plans;
  for (int rank = first; rank < first + count; ++rank) {
    plans.push_back(make_plan(problem, rank, routing, check));
  }
  return plans;
}

MachineProfile with_spare_workers(const MachineProfile& profile, int spare) {
  require(spare >= 0 && (spare == 0 || spare < profile.workers), ErrorCode::kInvalidArgument,
          "workers that are spared are ", spare, " of ", profile.workers,
          "; 0 to all but one are accepted");
  MachineProfile fewer = profile;
  fewer.workers -= spare;
  const double faster =
      spare == 0 ? 1 : std::sqrt(static_cast<double>(fewer.workers) / profile.workers);
  for (GemmCost& cost : fewer.gemms) {
    for (double* seconds : {&cost.fixed, &cost.per_mnk, &cost.per_mk, &cost.per_nk, &cost.per_mn}) {
      *seconds *= faster;
    }
  }
  return fewer;
}

MachineProfile without_communication(const MachineProfile& profile) {
  MachineProfile free = profile;
  free.link = {};
  free.dispatch = {};
  free.wake.flag_s = 0;
  free.beside_link = 1;
  return free;
}

double Prediction::exposed_s() const {
  return std::max(0.0, simulated.seconds - without_communication_s);
}

Prediction predict(std::span<const RoutingPlan> plans, Pass pass, const Schedule& schedule,
                   const MachineProfile& profile, const SimulationOptions& options) {
  Prediction p{.simulated = simulate(plans, pass, schedule, profile, options)};
  const MachineProfile free = without_communication(profile);
  p.without_communication_s = simulate(plans, pass, schedule, free).seconds;
  return p;
}

}  // namespace uniep::tune
