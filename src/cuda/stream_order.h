#pragma once

#include <cuda_runtime_api.h>

#include <optional>

#include "base/check.h"
#include "base/cuda/check_cuda.h"
#include "cuda/capture.h"

namespace uniep::cuda {

/// Knows the stream of the call at hand, and makes the calls of a layer run in the order in which
/// they are made, whatever streams they are on: a call on another stream than the one before waits
/// for all that was put on that one. So memory may be handed from any call to any later one. Not so
/// across the begin or end of a graph capture, for nothing of a capture runs then.
class StreamOrder {
 public:
  /// `own`: the stream of calls that name none.
  explicit StreamOrder(cudaStream_t own) : own_(own), stream_(own) {
    for (cudaEvent_t* event : {&of_calls_, &of_captures_}) {
      check_cuda(cudaEventCreateWithFlags(event, cudaEventDisableTiming), "create an event");
    }
  }
  StreamOrder(const StreamOrder&) = delete;
  StreamOrder& operator=(const StreamOrder&) = delete;
  ~StreamOrder() {
    ignore_cuda(cudaEventDestroy(of_calls_));
    ignore_cuda(cudaEventDestroy(of_captures_));
  }

  /// A call is about to be put on the stream that it `named`.
  void begin_call(std::optional<void*> named) {
    stream_ = named ? static_cast<cudaStream_t>(*named) : own_;
    captured_ = begin_on(stream_);
  }

  /// The stream of the call at hand, or else of the last.
  cudaStream_t stream() const { return stream_; }
  /// Whether that call is captured in a CUDA graph.
  bool captured() const { return captured_; }

  /// The stream of the call at hand is the same in every thread: by its handle alone nobody could
  /// make a call of one thread wait for that of another.
  void require_same_in_threads() const {
    require(stream_ != cudaStreamPerThread, ErrorCode::kInvalidArgument,
            "options.cuda_stream is cudaStreamPerThread, another stream in each thread; a stream "
            "that was created is accepted, or null, the default one");
  }

  /// Refuses a `call` that waits for the stream, if that is being captured.
  void require_no_capture(const char* call) const { cuda::require_no_capture(stream_, call); }

  /// Waits until all calls are done, and all else that is on the stream. Graphs may be replayed on
  /// any stream.
  void synchronize() const {
    if (last_capture_) {
      check_cuda(cudaDeviceSynchronize(), "wait for the device");
      return;
    }
    if (last_ && *last_ != stream_) {
      check_cuda(cudaStreamSynchronize(*last_), "wait for the stream");
    }
    check_cuda(cudaStreamSynchronize(stream_), "wait for the stream");
  }

 private:
  struct Captured {
    cudaStream_t stream;
    unsigned long long number;
  };

  /// Returns whether what is put on `stream` is captured.
  bool begin_on(cudaStream_t stream) {
    const unsigned long long capture = capture_of(stream);
    if (capture != 0) {
      if (last_capture_ && last_capture_->number == capture) {
        wait(stream, last_capture_->stream, of_captures_);
      }
      last_capture_ = {stream, capture};
      return true;
    }
    if (last_ && capture_of(*last_) == 0) wait(stream, *last_, of_calls_);
    last_ = stream;
    return false;
  }

  static void wait(cudaStream_t later, cudaStream_t earlier, cudaEvent_t event) {
    if (later == earlier) return;
    check_cuda(cudaEventRecord(event, earlier), "record an event");
    check_cuda(cudaStreamWaitEvent(later, event, 0), "make a stream wait");
  }

  const cudaStream_t own_;
  cudaStream_t stream_;
  bool captured_ = false;
  cudaEvent_t of_calls_ = nullptr;
  cudaEvent_t of_captures_ = nullptr;
  std::optional<cudaStream_t> last_;  // of the last call that was not captured
  std::optional<Captured> last_capture_;
};

}  // namespace uniep::cuda
