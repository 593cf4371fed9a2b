#pragma once

#include <optional>

#include "uniep/layer.h"

namespace uniep::cuda {

/// What a layer on a GPU needs, see Layer::memory_needs. Throws Error(kUnsupported) if the backend
/// cannot have such a layer.
MemoryNeeds memory_needs(const Problem& problem, int num_ranks,
                         std::optional<std::int64_t> rows = {});

}  // namespace uniep::cuda
