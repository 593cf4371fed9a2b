#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace uniep::testing {

/// Element i becomes first + i, by a kernel on the current device.
cudaError_t write_sequence(std::uint32_t* to, std::int64_t count, std::uint32_t first);

}  // namespace uniep::testing
