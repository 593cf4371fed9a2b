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

constexpr CudaErf kOwnErf = CUDART_VERSION < 13020 ? CudaErf::kBefore13_2 : CudaErf::kSince13_2;

__global__ void count_differing_erfs_kernel(cuda::ErfCoefficients coefficients,
                                            std::uint32_t* differing) {
  const std::uint32_t first = blockIdx.x * blockDim.x + threadIdx.x;
  const std::uint32_t step = gridDim.x * blockDim.x;
  std::uint32_t count = 0;
  for (std::uint64_t bits = first; bits <= UINT32_MAX; bits += step) {
    const float x = __uint_as_float(static_cast<std::uint32_t>(bits));
    const float own = cuda::cuda_erf(x, coefficients), wanted = erff(x);
    if (__float_as_uint(own) != __float_as_uint(wanted) && !(isnan(own) && isnan(wanted))) ++count;
  }
  atomicAdd(differing, count);
}

}  // namespace

cudaError_t count_differing_erfs(std::uint32_t* differing) {
  count_differing_erfs_kernel<<<1024, 256>>>(cuda::coefficients_of(kOwnErf), differing);
  const cudaError_t launched = cudaGetLastError();
  return launched != cudaSuccess ? launched : cudaDeviceSynchronize();
}

cudaError_t both_sigmoids(std::uint32_t* branch_free, std::uint32_t* divided,
                          std::uint32_t* is_usual) {
  both_sigmoids_kernel<<<256, 256>>>(branch_free, divided, is_usual);
  const cudaError_t launched = cudaGetLastError();
  return launched != cudaSuccess ? launched : cudaDeviceSynchronize();
}

}  // namespace uniep::testing
