#include "cuda/launch.h"
#include "cuda/ptx/sync.cuh"

namespace uniep::cuda {
namespace {

/// A CTA of one thread for each slot.
__global__ void refuse_kernel(const __grid_constant__ RefusalSlots slots,
                              const __grid_constant__ Refusal refusal) {
  Refusal* slot = slots.by_rank[blockIdx.x];
  if (atomicExch_system(&slot->claimed, 1u) != 0) return;
  slot->code = refusal.code;
  for (int i = 0; i < static_cast<int>(sizeof(refusal.sentence)); ++i) {
    slot->sentence[i] = refusal.sentence[i];
  }
  ptx::add_release_system(&slot->call, refusal.call);
}

}  // namespace

cudaError_t launch_refuse(const RefusalSlots& slots, const Refusal& refusal, cudaStream_t stream) {
  refuse_kernel<<<static_cast<unsigned>(slots.num_ranks), 1, 0, stream>>>(slots, refusal);
  return cudaGetLastError();
}

}  // namespace uniep::cuda
