#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <optional>
#include <vector>

#include "base/cuda/check_cuda.h"
#include "cuda/pass_memory.h"
#include "uniep/timeline.h"

namespace uniep::cuda {

/// Times the launches of a pass by events on its stream.
class PassClock {
 public:
  PassClock() {
    for (cudaEvent_t& event : events_) check_cuda(cudaEventCreate(&event), "create an event");
  }
  PassClock(const PassClock&) = delete;
  PassClock& operator=(const PassClock&) = delete;
  ~PassClock() {
    for (const cudaEvent_t event : events_) cudaEventDestroy(event);
  }

  /// Times nothing, for a pass whose launches are captured in a CUDA graph.
  void skip(Pass pass) {
    pass_ = pass;
    stages_.clear();
    runs_ = false;
  }

  void start(Pass pass, cudaStream_t stream) {
    skip(pass);
    runs_ = true;
    mark(stream);
  }

  /// Ends a launch; without a stage where it holds several.
  void lap(std::optional<Stage> stage, cudaStream_t stream) {
    if (!runs_) return;
    stages_.push_back(stage);
    mark(stream);
  }

  /// Waits for the last launch; adds the times to `stats`.
  void read(PassStats& stats) const {
    stats.pass = pass_;
    stats.launches = static_cast<int>(stages_.size() - std::ranges::count(stages_, Stage::kEnter));
    if (stages_.empty()) return;
    check_cuda(cudaEventSynchronize(events_[stages_.size()]), "wait for the pass");
    stats.elapsed_s = seconds(0, stages_.size());
    for (std::size_t i = 0; i < stages_.size(); ++i) {
      if (!stages_[i]) continue;
      stats[*stages_[i]].tasks += 1;
      stats[*stages_[i]].busy_s += seconds(i, i + 1);
    }
  }

 private:
  void mark(cudaStream_t stream) {
    check_cuda(cudaEventRecord(events_[stages_.size()], stream), "record an event");
  }

  double seconds(std::size_t from, std::size_t to) const {
    float ms = 0;
    check_cuda(cudaEventElapsedTime(&ms, events_[from], events_[to]), "read the time of a launch");
    return ms * 1e-3;
  }

  Pass pass_ = Pass::kForward;
  bool runs_ = false;
  std::vector<std::optional<Stage>> stages_;
  std::array<cudaEvent_t, kMaxLaunches + 2> events_{};  // `enter` has one too
};

}  // namespace uniep::cuda
