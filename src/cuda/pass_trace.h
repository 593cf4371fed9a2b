#pragma once

#include <cuda_runtime_api.h>

#include <span>
#include <vector>

#include "cuda/device/context.cuh"
#include "cuda/device/trace_record.h"
#include "cuda/device_array.h"
#include "uniep/timeline.h"

namespace uniep::cuda {

/// Records what the CTAs of a pass do, and turns it into a timeline: the first workers are CTAs
/// (what their consumers computed, and waited for), those behind their dispatching warps, by CTA.
class PassTrace {
 public:
  /// Room for `tasks_per_row` tasks of each CTA and each dispatching warp in one pass.
  /// `experts`: what an event calls each expert of this rank.
  PassTrace(int sms, int tasks_per_row, std::vector<std::int32_t> experts);

  DeviceTrace device() const;

  /// Forgets what was recorded; what is, from here on, is of a pass of so many CTAs. Can be
  /// `captured` in a CUDA graph, each replay of which does so.
  void start(Pass pass, int ctas, cudaStream_t stream, bool captured);

  /// What was recorded since the last `start`, when the stream has done it; then it is forgotten.
  std::vector<TimelineEvent> take(cudaStream_t stream);

  /// Whether what is taken may be a replay's, of which the host does not know.
  bool in_graphs() const { return in_graphs_; }

 private:
  void forget(cudaStream_t stream);
  /// Word `index` behind the counts, as four equal bytes of `value`: what a stream can set.
  void note(int index, int value, cudaStream_t stream);

  const int rows_;
  const int capacity_;
  const std::vector<std::int32_t> experts_;
  DeviceArray<std::byte> records_;
  DeviceArray<std::int32_t> counts_;  // of each row's records; then the notes
  bool pending_ = false;    // records may be on the device that the next pass would overwrite
  bool in_graphs_ = false;  // then that is always so
};

/// Sums over the events of each stage; nothing else is set.
PassStats stage_sums(std::span<const TimelineEvent> events);

}  // namespace uniep::cuda
