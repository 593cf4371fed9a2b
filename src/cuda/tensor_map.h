#pragma once

#include <cuda.h>

#include <cstdint>
#include <span>

#include "graph/element.h"

namespace uniep::cuda {

/// A dense tensor of 3 or 4 dimensions, innermost first, for the copy engine: boxes of one 128-byte
/// swizzle row of the innermost dimension by `box[i]` of the others. Elements out of the tensor
/// read as zeros and are not written.
CUtensorMap tensor_map(const void* data, Element element, std::span<const std::int64_t> dimensions,
                       std::span<const int> box);

}  // namespace uniep::cuda
