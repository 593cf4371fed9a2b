#include "cuda/device/wgrad.cuh"
#include "cuda/kernels/gemm_kernel.cuh"
#include "cuda/launch.h"

namespace uniep::cuda {

cudaError_t launch_wgrad2(const DeviceContext& ctx, const StageMaps& maps, int ctas,
                          cudaStream_t stream) {
  return launch_gemm<Wgrad2>(ctx, maps, ctas, stream);
}

}  // namespace uniep::cuda
