#include <nccl_device.h>

#include "cuda/peer_pointers.h"

namespace uniep::cuda {
namespace {

__global__ void peer_pointers_kernel(ncclWindow_t window, void** pointers) {
  const int peer = static_cast<int>(threadIdx.x);
  pointers[peer] = ncclGetLsaPointer(window, 0, peer);
}

}  // namespace

cudaError_t peer_pointers(ncclWindow_t window, int count, void** pointers) {
  peer_pointers_kernel<<<1, static_cast<unsigned>(count)>>>(window, pointers);
  return cudaGetLastError();
}

}  // namespace uniep::cuda
