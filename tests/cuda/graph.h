#pragma once

#include <cuda_runtime_api.h>

#include <exception>
#include <functional>
#include <string>

#include "base/check.h"
#include "base/cuda/check_cuda.h"

namespace uniep::testing {

/// A stream that can be captured.
class Stream {
 public:
  Stream() {
    cuda::check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "make a stream");
  }
  ~Stream() { cudaStreamDestroy(stream_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  cudaStream_t get() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

/// What `calls` put on a stream, to be run again. The mode of the capture is the strictest:
/// whatever a capture may not do, in any thread, fails.
class Graph {
 public:
  Graph(const Stream& stream, const std::function<void()>& calls) : stream_(stream.get()) {
    cuda::check_cuda(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal), "capture");
    try {
      calls();
    } catch (const std::exception& error) {
      // What was refused has not spoilt the capture.
      const std::string what = cat("end a capture that found an error (", error.what(), ")");
      cuda::check_cuda(cudaStreamEndCapture(stream_, &graph_), what.c_str());
      cudaGraphDestroy(graph_);
      throw;
    }
    cuda::check_cuda(cudaStreamEndCapture(stream_, &graph_), "end the capture");
    cuda::check_cuda(cudaGraphInstantiate(&exec_, graph_, 0), "instantiate the graph");
  }
  ~Graph() {
    cudaGraphExecDestroy(exec_);
    cudaGraphDestroy(graph_);
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  void replay() const { replay_on(stream_); }
  void replay_on(cudaStream_t stream) const {
    cuda::check_cuda(cudaGraphLaunch(exec_, stream), "replay the graph");
  }

 private:
  cudaStream_t stream_;
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t exec_ = nullptr;
};

}  // namespace uniep::testing
