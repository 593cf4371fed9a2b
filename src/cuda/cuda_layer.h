#pragma once

#include <memory>

#include "layer/backend.h"

namespace uniep::cuda {

/// A layer whose ranks are processes with a GPU each.
std::unique_ptr<LayerBackend> make_layer(const Problem& problem, Communicator communicator,
                                         const LayerOptions& options);

}  // namespace uniep::cuda
