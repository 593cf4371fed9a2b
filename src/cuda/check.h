#pragma once

#include <cuda_runtime_api.h>

#include "base/check.h"

namespace uniep::cuda {

/// Throws Error(kDevice) unless `result` is success; `what` says what was attempted, as a phrase:
/// "cannot launch fc1: cudaErrorInvalidValue (invalid argument)" for "launch fc1".
inline void check_cuda(cudaError_t result, const char* what) {
  if (result == cudaSuccess) [[likely]]
    return;
  throw Error(ErrorCode::kDevice, cat("cannot ", what, ": ", cudaGetErrorName(result), " (",
                                      cudaGetErrorString(result), ")"));
}

}  // namespace uniep::cuda
