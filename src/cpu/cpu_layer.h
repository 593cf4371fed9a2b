#pragma once

#include <memory>

#include "layer/backend.h"

namespace uniep::cpu {

/// A layer whose ranks are threads of this process.
std::unique_ptr<LayerBackend> make_layer(const Problem& problem, Communicator communicator,
                                         const LayerOptions& options);

}  // namespace uniep::cpu
