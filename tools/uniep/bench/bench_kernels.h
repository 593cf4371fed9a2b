#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "uniep/bf16.h"

namespace uniep::tool {

/// `to[i] = bf16(scale * value first + i)` of the NormalStream with this key, as its `fill` does it
/// on the host, bit by bit. `first` is even.
cudaError_t launch_fill_normal(bf16* to, std::int64_t count, std::uint64_t key, std::uint64_t first,
                               double scale);

/// Adds to `*differing` how many of `count` elements differ in any bit.
cudaError_t launch_count_differing(const std::uint16_t* a, const std::uint16_t* b,
                                   std::int64_t count, unsigned long long* differing);
cudaError_t launch_count_differing(const std::uint32_t* a, const std::uint32_t* b,
                                   std::int64_t count, unsigned long long* differing);

}  // namespace uniep::tool
