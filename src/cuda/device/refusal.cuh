#pragma once

#include "cuda/ptx/sync.cuh"
#include "cuda/refusal.h"

namespace uniep::cuda {

// `calls` is this rank's; null in tests that have none.

/// Counts a call as begun. One thread does, in the kernel that a call begins with.
__device__ __forceinline__ void begin_call(CallState* calls) {
  if (calls != nullptr) ptx::add_relaxed_gpu(&calls->begun, 1);
}

/// Whether a rank refused the call at hand, or an earlier one that this rank could finish without
/// it.
__device__ __forceinline__ bool is_refused(const CallState* calls) {
  if (calls == nullptr) return false;
  const std::uint32_t refused = ptx::load_relaxed_system(&calls->refusal.call);
  return refused != 0 &&
         static_cast<std::int32_t>(ptx::load_relaxed_gpu(&calls->begun) - refused) >= 0;
}

}  // namespace uniep::cuda
