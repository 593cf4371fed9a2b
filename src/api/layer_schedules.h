#pragma once

#include <array>

#include "uniep/layer.h"

namespace uniep {

/// Collective: the schedules of passes that are given none, by Pass; the same on all ranks.
std::array<Schedule, 2> agree_on_layer_schedules(const Problem& problem,
                                                 const Communicator& communicator,
                                                 const LayerOptions& options);

}  // namespace uniep
