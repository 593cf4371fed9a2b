#pragma once

#include "uniep/layer.h"

namespace uniep::cuda {

/// Of a layer on a GPU. Throws Error(kUnsupported) where the backend cannot have such a layer.
MemoryNeeds memory_needs(const Problem& problem, int num_ranks);

}  // namespace uniep::cuda
