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

/// Starts it on `ctas` CTAs, all of which are resident at a time or none: they wait for one
/// another.
template <class Stages, class Shape>
cudaError_t launch_pass(const DeviceContext& ctx, const LaunchQueues& queues, const PassMaps& maps,
                        int ctas, cudaStream_t stream) {
  constexpr std::size_t kBytes = sizeof(PassShared<Shape>);
  const auto kernel = pass_kernel<Stages, Shape>;
  static const cudaError_t kPrepared = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kBytes));
  if (kPrepared != cudaSuccess) return kPrepared;
  cudaLaunchAttribute cooperative{};
  cooperative.id = cudaLaunchAttributeCooperative;
  cooperative.val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(ctas));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = kBytes;
  config.stream = stream;
  config.attrs = &cooperative;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, ctx, queues, maps);
}

}  // namespace uniep::cuda
