#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace uniep::testing {

/// For every bf16 number z, by its bits: sigmoid(z) without a branch and by an ordinary division,
/// as the bits of fp32, and whether epilogues would take the branch-free one. Each array has 65536
/// elements of device memory.
cudaError_t both_sigmoids(std::uint32_t* branch_free, std::uint32_t* divided,
                          std::uint32_t* is_usual);

/// Adds to `*differing`, in device memory, how many of all fp32 numbers have another cuda_erf than
/// erff, which is that of the CUDA that compiles this. NaNs count as equal.
cudaError_t count_differing_erfs(std::uint32_t* differing);

}  // namespace uniep::testing
