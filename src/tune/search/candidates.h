#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "schedule/space.h"
#include "tune/model/cost_model.h"
#include "tune/model/machine_profile.h"
#include "tune/search/model_search.h"
#include "tune/search/session.h"

namespace uniep::tune {

/// The points of the space that the model puts first, of as many as it can look at in so many
/// seconds, begun from those known; nothing where that are too few to choose from.
std::vector<Ranked> rank_by_model(std::span<const RoutingPlan> plans, Pass pass, const Space& space,
                                  const std::vector<Schedule>& known, const MachineProfile& profile,
                                  const Topology& topology, double seconds, std::uint64_t seed);

/// What is measured: what is known beforehand, and `count` points that the model, or chance where
/// it says nothing, proposes.
std::vector<SessionCandidate> candidates_of(const Space& space, const std::vector<Schedule>& known,
                                            const std::vector<Ranked>& by_model, std::size_t count,
                                            std::uint64_t seed);

}  // namespace uniep::tune
