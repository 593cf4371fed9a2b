#include "cuda/device/fc1.cuh"
#include "cuda/kernels/gemm_kernel.cuh"
#include "cuda/launch.h"

namespace uniep::cuda {

cudaError_t launch_dfc1(const DeviceContext& ctx, const StageMaps& maps, int ctas,
                        cudaStream_t stream) {
  return launch_gemm<Dfc1>(ctx, maps, ctas, stream);
}

}  // namespace uniep::cuda
