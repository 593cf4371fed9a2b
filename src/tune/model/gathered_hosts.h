#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "tune/model/simulation.h"

// Passes of GPUs on several hosts, as the Python package runs them (python/uniep/_exchange.py,
// _crossing.py): collectives bring the tokens of every rank to its rail on every host; each host's
// layer is one group that sees all tokens and has its own experts; a sum of each host comes back
// for each token.

namespace uniep::tune {

/// What crosses between hosts beside something else.
enum class CrossesUnder {
  kNothing,  ///< the passes wait for what crosses, and it for them
  kWeights,  ///< gradients of tokens cross under those of weights
  kPasses,   ///< and tokens and sums under the waves of passes (Problem::gathered_hosts)
};

/// The plans of one host's ranks, which stand for those of all: of the host whose experts have the
/// most rows. `problem` is that of all ranks, each with `max_tokens` tokens; for what crosses under
/// passes, of at most kMaxHostsInWaves hosts.
std::vector<RoutingPlan> plans_of_gathered_host(const Problem& problem, int ranks, int hosts,
                                                std::span<const std::int32_t> topk_ids,
                                                CrossesUnder under);

/// A pass of these plans with all that crosses for it, from the tokens of a rank to the sum over
/// hosts of what they give. `hosts`: that there are; the topology's NICs are between them.
SimulatedPass simulate_gathered(std::span<const RoutingPlan> plans, int hosts, CrossesUnder under,
                                Pass pass, const Schedule& schedule, const MachineProfile& profile,
                                const Topology& topology);

}  // namespace uniep::tune
