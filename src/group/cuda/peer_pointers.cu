#include <nccl_device.h>

#include "group/cuda/peer_pointers.h"

namespace uniep::cuda {
namespace {

__global__ void peer_pointers_kernel(ncclWindow_t window, void** pointers) {
  const int peer = static_cast<int>(threadIdx.x);
  pointers[peer] = ncclGetLsaPointer(window, 0, peer);
}

}  // namespace

cudaError_t read_peer_pointers(ncclWindow_t window, std::vector<void*>& peers) {
  void** device = nullptr;
  const std::size_t bytes = peers.size() * sizeof(void*);
  cudaError_t error = cudaMalloc(reinterpret_cast<void**>(&device), bytes);
  if (error != cudaSuccess) return error;
  peer_pointers_kernel<<<1, static_cast<unsigned>(peers.size())>>>(window, device);
  error = cudaGetLastError();
  if (error == cudaSuccess) error = cudaMemcpy(peers.data(), device, bytes, cudaMemcpyDeviceToHost);
  const cudaError_t freed = cudaFree(device);
  return error != cudaSuccess ? error : freed;
}

}  // namespace uniep::cuda
