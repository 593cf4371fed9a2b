#pragma once

#include <cstddef>
#include <span>

#include "plan/routing.h"

// A plan of the CPU backend as bytes that may lie, and be moved, anywhere: the routing of all
// ranks, of which the plan is a function (layout/workspace.h: CpuPlanLayout). Building it anew
// takes far less time than the pass that asks for it.

namespace uniep {

/// `bytes` holds CpuPlanLayout(problem, ranks).bytes or more.
void write_plan(std::span<std::byte> bytes, const Problem& problem, int rank,
                const Routing& routing);

/// Throws Error(kInvalidArgument) where the bytes are not the plan of `rank` of `num_ranks` for
/// `tokens` tokens of a layer of this problem.
RoutingPlan read_plan(std::span<const std::byte> bytes, const Problem& problem, int rank,
                      int num_ranks, std::int64_t tokens, bool flagged, int hosts = 1);

}  // namespace uniep
