#pragma once

#include <cuda_runtime_api.h>
#include <nccl.h>

namespace uniep::cuda {

/// Fills `pointers` (device memory) with the addresses at which the `count` ranks' parts of an NCCL
/// window are mapped here: only device code can ask for them.
cudaError_t peer_pointers(ncclWindow_t window, int count, void** pointers);

}  // namespace uniep::cuda
