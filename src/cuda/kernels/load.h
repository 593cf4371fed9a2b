#pragma once

#include <cuda_runtime.h>

namespace uniep::cuda {

/// Loads a kernel onto this thread's device.
template <class Kernel>
cudaError_t load_kernel(Kernel* kernel) {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, kernel);
}

}  // namespace uniep::cuda
