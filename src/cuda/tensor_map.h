#pragma once

#include <cuda.h>

#include <cstdint>
#include <optional>
#include <span>

#include "graph/element.h"

namespace uniep::cuda {

/// A tensor of 3 or 4 dimensions, innermost first, for the copy engine: boxes of one 128-byte
/// swizzle row of the innermost dimension by `box[i]` of the others. Elements out of the tensor
/// read as zeros and are not written. It is dense, but that its rows, of the innermost dimension,
/// may be `row_stride` elements apart.
CUtensorMap tensor_map(const void* data, Element element, std::span<const std::int64_t> dimensions,
                       std::span<const int> box,
                       std::optional<std::int64_t> row_stride = std::nullopt);

}  // namespace uniep::cuda
