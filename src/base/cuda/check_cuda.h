#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "base/check.h"

namespace uniep::cuda {

/// Throws Error(kDevice) unless `result` is success; `what` says what was attempted, as a phrase:
/// "cannot launch fc1: cudaErrorInvalidValue (invalid argument)" for "launch fc1".
inline void check_cuda(cudaError_t result, const char* what) {
  if (result == cudaSuccess) [[likely]]
    return;
  (void)cudaGetLastError();  // so that a later look does not find this error again
  throw Error(ErrorCode::kDevice, cat("cannot ", what, ": ", cudaGetErrorName(result), " (",
                                      cudaGetErrorString(result), ")"));
}
inline void check_cuda(cudaError_t result, const std::string& what) {
  check_cuda(result, what.c_str());
}

/// Of a call whose failure changes nothing, since all is ending or another error is on its way: a
/// later look does not find it.
inline void ignore_cuda(cudaError_t result) {
  if (result != cudaSuccess) (void)cudaGetLastError();
}

}  // namespace uniep::cuda
