#pragma once

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <vector>

namespace uniep::cuda {

/// Asks for the addresses at which the ranks' parts of an NCCL window are mapped here, element r
/// for rank r. NCCL 2.28 tells them to device code only, hence a kernel.
cudaError_t read_peer_pointers(ncclWindow_t window, std::vector<void*>& peers);

}  // namespace uniep::cuda
