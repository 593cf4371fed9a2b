#include "cuda/device/dispatch.cuh"
#include "cuda/launch.h"

namespace uniep::cuda {
namespace {

__global__ void __launch_bounds__(32 * kDispatchWarps, 1)
    dispatch_kernel(const __grid_constant__ DeviceContext ctx) {
  extern __shared__ __align__(128) std::uint8_t memory[];
  DispatchWarp warp(ctx, *reinterpret_cast<DispatchShared*>(memory));
  const std::int64_t size = ctx.queue.size();
  for (std::int64_t i = blockIdx.x; i < size; i += gridDim.x) {
    if (!warp.run(queue_task(ctx.view, ctx.queue, i))) break;
  }
  warp.flush();
}

}  // namespace

cudaError_t launch_dispatch(const DeviceContext& ctx, int ctas, cudaStream_t stream) {
  static const cudaError_t kPrepared =
      cudaFuncSetAttribute(dispatch_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           static_cast<int>(sizeof(DispatchShared)));
  if (kPrepared != cudaSuccess) return kPrepared;
  dispatch_kernel<<<ctas, 32 * kDispatchWarps, sizeof(DispatchShared), stream>>>(ctx);
  return cudaGetLastError();
}

}  // namespace uniep::cuda
