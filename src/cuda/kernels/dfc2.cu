#include "cuda/device/fc2.cuh"
#include "cuda/kernels/gemm_kernel.cuh"
#include "cuda/launch.h"

namespace uniep::cuda {

cudaError_t launch_dfc2(const DeviceContext& ctx, const StageMaps& maps, int ctas,
                        cudaStream_t stream) {
  return launch_gemm<Dfc2>(ctx, maps, ctas, stream);
}

}  // namespace uniep::cuda
