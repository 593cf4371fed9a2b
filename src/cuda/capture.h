#pragma once

#include <cuda_runtime_api.h>

#include "base/check.h"
#include "cuda/check.h"

namespace uniep::cuda {

/// Whether `stream` is being captured in a CUDA graph. The default stream cannot be.
inline bool capturing(cudaStream_t stream) {
  if (stream == nullptr) return false;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check_cuda(cudaStreamIsCapturing(stream, &status), "ask whether the stream is captured");
  return status != cudaStreamCaptureStatusNone;
}

/// For calls that wait for the stream, which would spoil a capture.
inline void require_no_capture(cudaStream_t stream, const char* call) {
  require(!capturing(stream), ErrorCode::kUnsupported, call,
          " waits for the stream, which is being captured in a CUDA graph; it is accepted outside "
          "of captures");
}

/// Lets this thread make calls, while it lives, that a capture in a stricter mode forbids: those
/// that have nothing to do with the captured stream.
class UncapturedScope {
 public:
  UncapturedScope() { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~UncapturedScope() { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }
  UncapturedScope(const UncapturedScope&) = delete;
  UncapturedScope& operator=(const UncapturedScope&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace uniep::cuda
