#include "cuda/kernels/start_kernel.h"
#include "cuda/pass_kernels.h"
#include "cuda/ptx/sync.cuh"

namespace uniep::cuda {
namespace {

/// A CTA of one thread for each slot.
__global__ void refuse_kernel(const __grid_constant__ CallStates calls, int rank,
                              const __grid_constant__ Refusal refusal) {
  Refusal* slot = &calls.by_rank[blockIdx.x]->refusal;
  if (atomicExch_system(&slot->claimed, 1u) != 0) return;
  slot->code = refusal.code;
  for (int i = 0; i < static_cast<int>(sizeof(refusal.sentence)); ++i) {
    slot->sentence[i] = refusal.sentence[i];
  }
  const std::uint32_t begun = ptx::load_relaxed_gpu(&calls.by_rank[rank]->begun);
  ptx::add_release_system(&slot->call, begun + refusal.call);
}

}  // namespace

cudaError_t prepare_refuse() { return load_kernel(refuse_kernel); }

cudaError_t launch_refuse(const CallStates& calls, int rank, const Refusal& refusal,
                          cudaStream_t stream) {
  return launch_kernel(refuse_kernel, {.ctas = calls.num_ranks, .threads = 1}, stream, calls, rank,
                       refusal);
}

}  // namespace uniep::cuda
