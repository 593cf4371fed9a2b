#pragma once

#include "tune/model/network.h"

namespace uniep::tune {

/// The network between hosts as CPU ranks of this machine have it: what a block takes over a rail
/// between two ranks of this process, at the speed that UNIEP_CPU_NETWORK_GBPS emulates, if any.
/// Takes some 0.2 s, and of a slow network as long as 1 MB. Throws Error(kUnsupported) where this
/// build has no transport between hosts.
Topology measure_network(int ranks_per_host);

}  // namespace uniep::tune
