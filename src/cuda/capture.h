#pragma once

#include <cuda_runtime_api.h>

#include "base/check.h"
#include "base/cuda/check_cuda.h"

namespace uniep::cuda {

/// The number of the graph capture that `stream` is in, or 0. The default stream cannot be in one.
inline unsigned long long capture_of(cudaStream_t stream) {
  if (stream == nullptr) return 0;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long capture = 0;
  check_cuda(cudaStreamGetCaptureInfo(stream, &status, &capture),
             "ask whether the stream is captured");
  return status == cudaStreamCaptureStatusNone ? 0 : capture;
}

/// Whether `stream` is being captured in a CUDA graph.
inline bool capturing(cudaStream_t stream) { return capture_of(stream) != 0; }

/// Refuses a call that waits for the stream if that is being captured: waiting would spoil the
/// capture.
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
