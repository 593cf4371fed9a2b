#pragma once

#include "cuda/device/pass_body.cuh"
#include "cuda/launch.h"

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

/// Starts it, once prepared, on `ctas` CTAs, all of which are resident at a time or none: they wait
/// for one another.
template <class Stages, class Shape>
cudaError_t launch_pass(const DeviceContext& ctx, const LaunchQueues& queues, const PassMaps& maps,
                        int ctas, cudaStream_t stream) {
  cudaLaunchAttribute cooperative{};
  cooperative.id = cudaLaunchAttributeCooperative;
  cooperative.val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(ctas));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = sizeof(PassShared<Shape>);
  config.stream = stream;
  config.attrs = &cooperative;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, pass_kernel<Stages, Shape>, ctx, queues, maps);
}

}  // namespace uniep::cuda
