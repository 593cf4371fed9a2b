#pragma once

#include <cuda_runtime.h>

#include "base/math.h"
#include "cuda/device_plan.h"

namespace uniep::cuda {

/// Launches at most `ctas` CTAs (0: one per SM), all of them resident or none: they wait for one
/// another. Neither allocates nor synchronises.
template <class Args>
cudaError_t launch_resident(void (*kernel)(Args), const Args& args, int threads,
                            std::size_t shared_bytes, int ctas, cudaStream_t stream) {
  int device = 0;
  int sms = 0;
  if (const cudaError_t e = cudaGetDevice(&device); e != cudaSuccess) return e;
  if (const cudaError_t e = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
      e != cudaSuccess) {
    return e;
  }
  if (const cudaError_t e = cudaFuncSetAttribute(
          kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
      e != cudaSuccess) {
    return e;
  }
  cudaLaunchAttribute cooperative{};
  cooperative.id = cudaLaunchAttributeCooperative;
  cooperative.val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(min_of(ctas == 0 ? sms : ctas, kMaxPlanCtas)));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &cooperative;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, args);
}

}  // namespace uniep::cuda
