#pragma once

#include "cuda/ptx/sync.cuh"
#include "cuda/refusal.h"

namespace uniep::cuda {

/// Whether a rank refused call number `call`, or an earlier one that this rank could finish without
/// it. `refusal` is this rank's slot; null where there is none.
__device__ __forceinline__ bool is_refused(const Refusal* refusal, std::uint32_t call) {
  if (refusal == nullptr) return false;
  const std::uint32_t refused = ptx::load_relaxed_system(&refusal->call);
  return refused != 0 && static_cast<std::int32_t>(call - refused) >= 0;
}

}  // namespace uniep::cuda
