#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "tune/model/simulation.h"

// Passes of GPUs on several hosts, as the Python package runs them (crossing.py and
// exchange.py in python/uniep/_between_hosts): collectives bring the tokens of every rank to its
// rail on every host; each host's layer is one group that sees all tokens and has its own experts;
// for each token a sum of each host comes back, or all rows, which are then added up.

namespace uniep::tune {

/// What crosses between hosts beside something else.
enum class CrossesUnder {
  kNothing,  ///< the passes wait for what crosses, and it for them
  kWeights,  ///< gradients of tokens cross under those of weights
  kPasses,   ///< and tokens and sums under the waves of passes (Problem::gathered_hosts)
};

/// One host of those that gather tokens, which stands for all: the one whose experts have the most
/// rows.
struct GatheredHost {
  int hosts = 1;  ///< that there are
  int host = 0;   ///< which of them
  CrossesUnder under = CrossesUnder::kNothing;
  std::vector<RoutingPlan> plans{};  ///< of its ranks; with Problem::slot_rows all rows cross
};

/// `problem` is that of all ranks, each with `max_tokens` tokens; for what crosses under passes, of
/// at most kMaxHostsInWaves hosts. `all_rows`: they cross, not a sum of each host.
GatheredHost gathered_host(const Problem& problem, int ranks, int hosts,
                           std::span<const std::int32_t> topk_ids, CrossesUnder under,
                           bool all_rows = false);

/// A pass of its plans with all that crosses for it, from the tokens of a rank to the sum over
/// hosts of what they give. The topology's NICs are between hosts. `exact_hosts`: tokens cross only
/// where they have an expert, and rows only where there are any, as if every host received as many
/// as this one.
SimulatedPass simulate_gathered(const GatheredHost& host, bool exact_hosts, Pass pass,
                                const Schedule& schedule, const MachineProfile& profile,
                                const Topology& topology);

}  // namespace uniep::tune
