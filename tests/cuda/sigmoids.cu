#include "cuda/device/activation.cuh"
#include "cuda/sigmoids.h"

namespace uniep::testing {
namespace {

__global__ void both_sigmoids_kernel(std::uint32_t* branch_free, std::uint32_t* divided,
                                     std::uint32_t* is_usual) {
  const unsigned bits = blockIdx.x * blockDim.x + threadIdx.x;
  const float z = __uint_as_float(bits << 16);
  branch_free[bits] = __float_as_uint(cuda::sigmoid<true>(z));
  divided[bits] = __float_as_uint(cuda::sigmoid<false>(z));
  is_usual[bits] = cuda::is_unusual_gate(z) ? 0 : 1;
}

}  // namespace

cudaError_t both_sigmoids(std::uint32_t* branch_free, std::uint32_t* divided,
                          std::uint32_t* is_usual) {
  both_sigmoids_kernel<<<256, 256>>>(branch_free, divided, is_usual);
  const cudaError_t launched = cudaGetLastError();
  return launched != cudaSuccess ? launched : cudaDeviceSynchronize();
}

}  // namespace uniep::testing
