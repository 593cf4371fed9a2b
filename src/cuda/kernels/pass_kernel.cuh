#pragma once

#include <type_traits>

#include "cuda/device/sm90/pass_body.cuh"
#include "cuda/kernels/start_kernel.h"
#include "cuda/pass_variant.h"

namespace uniep::cuda {

template <class Stages, class Shape>
__global__ void __launch_bounds__(kThreads, 1)
    pass_kernel(const __grid_constant__ DeviceContext ctx,
                const __grid_constant__ LaunchQueues queues,
                const __grid_constant__ PassMaps maps) {
  extern __shared__ __align__(1024) std::uint8_t memory[];
  run_pass<Stages>(ctx, queues, maps, *reinterpret_cast<PassShared<Shape>*>(memory));
}

template <PassVariant v>
using ShapeOf = std::conditional_t<v.recomputes, RingShape<v.tile_n>, TileShape<v.tile_n>>;
template <PassVariant v>
using MainOf = std::conditional_t<v.bf16_main, bf16, float>;
template <PassVariant v>
using StagesOf = std::conditional_t<
    v.pass == Pass::kForward, ForwardStages<ShapeOf<v>, v.general>,
    std::conditional_t<v.recomputes, RecomputingStages<ShapeOf<v>, MainOf<v>, v.general>,
                       BackwardStages<ShapeOf<v>, MainOf<v>, v.general>>>;

template <PassVariant kVariant>
cudaError_t PassKernel<kVariant>::prepare() {
  return cudaFuncSetAttribute(pass_kernel<StagesOf<kVariant>, ShapeOf<kVariant>>,
                              cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(sizeof(PassShared<ShapeOf<kVariant>>)));
}

/// Launches of weight gradients alone wait for nobody, so that they run on the SMs that other work
/// leaves, such as what brings tokens to other hosts.
template <PassVariant kVariant>
cudaError_t PassKernel<kVariant>::launch(const DeviceContext& ctx, const LaunchQueues& queues,
                                         const PassMaps& maps, int ctas, cudaStream_t stream) {
  const LaunchSize size{ctas, kThreads, sizeof(PassShared<ShapeOf<kVariant>>)};
  return launch_kernel(pass_kernel<StagesOf<kVariant>, ShapeOf<kVariant>>, size,
                       resident_together(ctx.view.moves_data()), stream, ctx, queues, maps);
}

}  // namespace uniep::cuda
