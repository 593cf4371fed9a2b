#pragma once

#include "cuda/device/gemm.cuh"

namespace uniep::cuda {

/// A launch that holds one GEMM stage.
template <class Stage>
__global__ void __launch_bounds__(kThreads, 1)
    gemm_kernel(const __grid_constant__ DeviceContext ctx, const __grid_constant__ StageMaps maps) {
  extern __shared__ __align__(1024) std::uint8_t memory[];
  run_gemm<Stage>(ctx, maps, *reinterpret_cast<GemmShared*>(memory));
}

/// Starts it on `ctas` CTAs, all of which are resident at a time.
template <class Stage>
cudaError_t launch_gemm(const DeviceContext& ctx, const StageMaps& maps, int ctas,
                        cudaStream_t stream) {
  static const cudaError_t kPrepared =
      cudaFuncSetAttribute(gemm_kernel<Stage>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           static_cast<int>(sizeof(GemmShared)));
  if (kPrepared != cudaSuccess) return kPrepared;
  gemm_kernel<Stage><<<ctas, kThreads, sizeof(GemmShared), stream>>>(ctx, maps);
  return cudaGetLastError();
}

}  // namespace uniep::cuda
