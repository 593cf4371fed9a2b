#pragma once

#include "cuda/device/sm90/pass_body.cuh"
#include "cuda/kernels/start_kernel.h"
#include "cuda/pass_kernels.h"

namespace uniep::cuda {

template <class Stages, class Shape>
__global__ void __launch_bounds__(kThreads, 1)
    pass_kernel(const __grid_constant__ DeviceContext ctx,
                const __grid_constant__ LaunchQueues queues,
                const __grid_constant__ PassMaps maps) {
  extern __shared__ __align__(1024) std::uint8_t memory[];
  run_pass<Stages>(ctx, queues, maps, *reinterpret_cast<PassShared<Shape>*>(memory));
}

/// Loads it onto this thread's device.
template <class Stages, class Shape>
cudaError_t prepare_pass() {
  return cudaFuncSetAttribute(pass_kernel<Stages, Shape>,
                              cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(sizeof(PassShared<Shape>)));
}

/// Starts it, once prepared, on `ctas` CTAs. Those of weight gradients alone wait for nobody, so
/// that they run on the SMs that other work leaves, such as what brings tokens to other hosts.
template <class Stages, class Shape>
cudaError_t launch_pass(const DeviceContext& ctx, const LaunchQueues& queues, const PassMaps& maps,
                        int ctas, cudaStream_t stream) {
  const LaunchSize size{ctas, kThreads, sizeof(PassShared<Shape>)};
  return launch_kernel(pass_kernel<Stages, Shape>, size, resident_together(ctx.view.moves_data()),
                       stream, ctx, queues, maps);
}

}  // namespace uniep::cuda
