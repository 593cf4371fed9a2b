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
  PassTrace(int sms, int tasks_per_row);

  DeviceTrace device() const;

  /// Forgets what was recorded.
  void start(cudaStream_t stream);

  /// What was recorded since `start` of a pass with so many CTAs, when the stream has done it.
  std::vector<TimelineEvent> read(Pass pass, int ctas, int first_expert, cudaStream_t stream) const;

 private:
  int rows_;
  int capacity_;
  DeviceArray<std::byte> records_;
  DeviceArray<std::int32_t> counts_;
};

/// Sums over the events of each stage; nothing else is set.
PassStats stage_sums(std::span<const TimelineEvent> events);

}  // namespace uniep::cuda
