#pragma once

#include <cuda_runtime.h>

#include <algorithm>

#include "cuda/device/context.cuh"
#include "cuda/plan_memory.h"
#include "cuda/stage_maps.h"

namespace uniep::cuda {

// Launches around those of a pass's stages (pass_variant.h), each in the translation unit of its
// name. The `prepare` function of a kernel loads it onto this thread's device, which the driver
// otherwise does at the first launch: too late where that is captured in a CUDA graph, or where
// running kernels wait for it.

/// What a pass writes where its plan has a fault and was made with CallOptions::overflow: all that
/// it would write otherwise, main gradients aside. Null: nothing.
struct FaultFill {
  bf16* tokens = nullptr;  // out or dx
  std::int64_t tokens_count = 0;
  template <class T>
  struct Elements {
    T* data = nullptr;
    std::int64_t count = 0;
  };
  Elements<float> dprobs[2];       // dprobs, dshared_probs
  Elements<bf16> weight_grads[6];  // dw1, dw2, db1, db2, dshared_w1, dshared_w2

  bool any_weight_grad() const {
    return std::ranges::any_of(weight_grads, [](const auto& e) { return e.data != nullptr; });
  }
};

/// What `enter` reads and writes besides the context.
struct EnterArgs {
  const PlanStatus* plan;    // null where it is known that the plan can be used
  std::uint32_t* drawn;      // of all launches of the pass, zeroed here
  std::uint32_t* ctas_done;  // 0 between launches
  FaultFill fill;
  int wave = 0;  // whose tokens are staged and published (token_waves.h)
};

cudaError_t prepare_enter();
cudaError_t launch_enter(const DeviceContext& ctx, const EnterArgs& args, int ctas,
                         cudaStream_t stream);

/// `fill`, where the plan has a fault: for passes that `enter` is no part of.
cudaError_t prepare_fault_fill();
cudaError_t launch_fault_fill(const PlanStatus* plan, const FaultFill& fill, int ctas,
                              cudaStream_t stream);

/// Maps in memory of experts' matrices: copies of `first` with other addresses. Where the matrices
/// are `cleared` and the plan has a fault, they are filled with zeros too.
struct ExpertMapsArgs {
  static constexpr int kMost = 512;
  CUtensorMap first;
  CUtensorMap* to = nullptr;
  const PlanStatus* cleared = nullptr;  // the plan's
  std::int64_t elements = 0;            // of a matrix, of those that are cleared
  int count = 0;
  void* begins[kMost] = {};
};
cudaError_t prepare_expert_maps();
cudaError_t launch_expert_maps(const ExpertMapsArgs& args, cudaStream_t stream);

/// Every rank's CallState, as mapped here.
struct CallStates {
  CallState* by_rank[kMaxCudaRanks];
  int num_ranks;
};

cudaError_t prepare_refuse();

/// Writes `refusal` to all ranks, as one of `rank`. Its `call` counts from the last call that this
/// rank began on the device: 0 is that one, 1 the next.
cudaError_t launch_refuse(const CallStates& calls, int rank, const Refusal& refusal,
                          cudaStream_t stream);

}  // namespace uniep::cuda
