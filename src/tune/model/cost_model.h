#pragma once

#include <span>
#include <vector>

#include "tune/model/simulation.h"

namespace uniep::tune {

/// Groups of more ranks than this are simulated by one of their ranks, the one with the most rows,
/// or on several hosts by those of its host.
inline constexpr int kMostSimulatedRanks = 8;

/// The part with the most rows, of so many equal parts of the experts: those of ranks or hosts.
int fullest_part(const Problem& problem, int parts, std::span<const std::int32_t> topk_ids);

/// The plans that a prediction needs of a routing: those of all ranks, or of those that stand for
/// them. Arguments are those of RoutingPlan::build.
std::vector<RoutingPlan> plans_to_simulate(const Problem& problem,
                                           std::span<const std::int64_t> tokens_per_rank,
                                           std::span<const std::int32_t> topk_ids,
                                           int most_ranks = kMostSimulatedRanks, int hosts = 1);

/// The profile of a machine with so many workers fewer. The others of a GPU then run faster, since
/// power limits them together: they make up for half of it (docs/research/power.md, "Fewer SMs").
MachineProfile with_spare_workers(const MachineProfile& profile, int spare);

/// The profile of a machine whose communication costs nothing.
MachineProfile without_communication(const MachineProfile& profile);

struct Prediction {
  SimulatedPass simulated;
  double without_communication_s = 0;  ///< under the same schedule

  double seconds() const { return simulated.seconds; }
  double exposed_s() const;  ///< what communication adds
};

Prediction predict(std::span<const RoutingPlan> plans, Pass pass, const Schedule& schedule,
                   const MachineProfile& profile, const SimulationOptions& options = {});

}  // namespace uniep::tune
