#include "cuda/kernels/pass_kernel.cuh"

namespace uniep::cuda {
namespace {

using Shape = RingShape<128>;
using Stages = RemakingStages<Shape, bf16, true>;

}  // namespace

cudaError_t prepare_remake_bf16_general_n128() { return prepare_pass<Stages, Shape>(); }

cudaError_t launch_remake_bf16_general_n128(const DeviceContext& ctx, const LaunchQueues& queues,
                                            const PassMaps& maps, int ctas, cudaStream_t stream) {
  return launch_pass<Stages, Shape>(ctx, queues, maps, ctas, stream);
}

}  // namespace uniep::cuda
