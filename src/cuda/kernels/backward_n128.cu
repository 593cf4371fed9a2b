#include "cuda/kernels/pass_kernel.cuh"

namespace uniep::cuda {

cudaError_t launch_backward_n128(const DeviceContext& ctx, const LaunchQueues& queues,
                                 const PassMaps& maps, int ctas, cudaStream_t stream) {
  using Shape = TileShape<128>;
  return launch_pass<BackwardStages<Shape>, Shape>(ctx, queues, maps, ctas, stream);
}

}  // namespace uniep::cuda
