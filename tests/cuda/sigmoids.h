#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace uniep::testing {

/// For every bf16 number z, by its bits: sigmoid(z) without a branch and by an ordinary division,
/// as the bits of fp32, and whether epilogues would take the branch-free one. Each array has 65536
/// elements of device memory.
cudaError_t both_sigmoids(std::uint32_t* branch_free, std::uint32_t* divided,
                          std::uint32_t* is_usual);

}  // namespace uniep::testing
