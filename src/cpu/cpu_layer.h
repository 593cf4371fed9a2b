#pragma once

#include <memory>
#include <optional>

#include "layer/backend.h"

namespace uniep::cpu {

/// A layer whose ranks are threads of this process, or processes with shared memory.
std::unique_ptr<LayerBackend> make_layer(const Problem& problem, Communicator communicator,
                                         const LayerOptions& options);

/// Layer::memory_needs.
MemoryNeeds memory_needs(const Problem& problem, int num_ranks,
                         std::optional<std::int64_t> rows = {}, int hosts = 1);

}  // namespace uniep::cpu
