#pragma once

#include <cuda.h>

#include <cstdint>
#include <span>

#include "uniep/bf16.h"

namespace uniep::cuda {

/// A dense bf16 tensor of 3 or 4 dimensions, innermost first, for the copy engine: boxes of 64
/// elements of the innermost dimension (one 128-byte swizzle row) by `box[i]` of the others.
/// Elements out of the tensor read as zeros and are not written.
CUtensorMap tensor_map(const bf16* data, std::span<const std::int64_t> dimensions,
                       std::span<const int> box);

}  // namespace uniep::cuda
