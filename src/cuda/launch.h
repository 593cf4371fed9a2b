#pragma once

#include <cuda_runtime.h>

#include "cuda/device/context.cuh"
#include "cuda/stage_maps.h"

namespace uniep::cuda {

// One launch per stage, each in the translation unit of its name. `ctas` persistent CTAs share the
// tasks of ctx.queue.

/// What `enter` reads and writes besides the context.
struct EnterArgs {
  const bf16* tokens;  // x or dy of this rank, [T, H]
  const float* probs;  // [T, K]; null in backward
  std::uint32_t* rows_ready_base;
  std::uint32_t* tile_done_base;
  std::uint32_t* expert_done_base;
  std::uint32_t* arrived_base;
  std::uint32_t* ctas_done;  // 0 between launches
};

cudaError_t launch_enter(const DeviceContext& ctx, const EnterArgs& args, int ctas,
                         cudaStream_t stream);
cudaError_t launch_dispatch(const DeviceContext& ctx, int ctas, cudaStream_t stream);
cudaError_t launch_reduce(const DeviceContext& ctx, int ctas, cudaStream_t stream);
cudaError_t launch_fc1(const DeviceContext& ctx, const StageMaps& maps, int ctas,
                       cudaStream_t stream);
cudaError_t launch_fc2(const DeviceContext& ctx, const StageMaps& maps, int ctas,
                       cudaStream_t stream);
cudaError_t launch_dfc2(const DeviceContext& ctx, const StageMaps& maps, int ctas,
                        cudaStream_t stream);
cudaError_t launch_dfc1(const DeviceContext& ctx, const StageMaps& maps, int ctas,
                        cudaStream_t stream);
cudaError_t launch_wgrad2(const DeviceContext& ctx, const StageMaps& maps, int ctas,
                          cudaStream_t stream);
cudaError_t launch_wgrad1(const DeviceContext& ctx, const StageMaps& maps, int ctas,
                          cudaStream_t stream);

/// Every rank's slot, as mapped here.
struct RefusalSlots {
  Refusal* by_rank[kMaxRanks];
  int num_ranks;
};

/// Writes `refusal` to all slots.
cudaError_t launch_refuse(const RefusalSlots& slots, const Refusal& refusal, cudaStream_t stream);

}  // namespace uniep::cuda
