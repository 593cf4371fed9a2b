#include "cuda/touch_memory.h"

namespace uniep::testing {
namespace {

__global__ void write_sequence_kernel(std::uint32_t* to, std::int64_t count, std::uint32_t first) {
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x; i < count;
       i += stride) {
    to[i] = first + static_cast<std::uint32_t>(i);
  }
}

}  // namespace

cudaError_t write_sequence(std::uint32_t* to, std::int64_t count, std::uint32_t first) {
  write_sequence_kernel<<<64, 256>>>(to, count, first);
  const cudaError_t launched = cudaGetLastError();
  return launched != cudaSuccess ? launched : cudaDeviceSynchronize();
}

}  // namespace uniep::testing
