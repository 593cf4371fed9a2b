#pragma once

#include <cuda_runtime.h>

#include <optional>
#include <string>
#include <vector>

#include "cuda/launch.h"
#include "uniep/layer.h"

namespace uniep::cuda {

/// The tensors of one pass in this rank's device memory. Shapes as in layout/workspace.h, El local
/// experts; pointers that the pass has no use for are null.
struct PassTensors {
  const bf16* tokens = nullptr;  // x or dy, [T, H]
  const float* probs = nullptr;  // [T, K]
  const bf16* w1 = nullptr;
  const bf16* w2 = nullptr;
  bf16* x_rows = nullptr;
  bf16* h = nullptr;
  float* row_probs = nullptr;
  bf16* a = nullptr;
  bf16* dy_rows = nullptr;
  bf16* dh = nullptr;
  float* dprob_groups = nullptr;
  bf16* token_out = nullptr;  // out or dx
  float* dprobs_out = nullptr;
  WeightGrad dw1{};
  WeightGrad dw2{};
};

/// What the CUDA backend lacks for this schedule on a device with `sms` SMs, or nothing where it
/// can run it.
std::optional<std::string> unsupported_reason(const Schedule& schedule, int sms);
/// Likewise for where weight gradients go.
std::optional<std::string> unsupported_reason(const BackwardWeightsArgs& args);

/// All that a pass, or its part at hand, would write for the caller, main gradients aside.
FaultFill fault_fill(const PassView& view, const PassTensors& tensors);

/// Loads all kernels of plans and passes onto this thread's device.
void prepare_kernels();

/// Communication and main queue of a launch.
struct QueuePair {
  QueueView comm;
  QueueView main;
};

/// One pass on one rank, as launches on a stream. The host waits for nothing.
class PassLauncher {
 public:
  /// `ctx` has everything but the tensors; `rows` is the number of rows that the row buffers hold;
  /// `queues` are those of every launch, in order.
  PassLauncher(const DeviceContext& ctx, const PassTensors& tensors, std::int64_t rows,
               std::vector<QueuePair> queues, int sms, cudaStream_t stream);

  /// Stages and publishes the tokens, where this part of the pass has any, and zeroes tickets.
  void enter(const EnterArgs& args);
  int num_launches() const { return static_cast<int>(queues_.size()); }
  /// The stage of a launch that holds one only.
  std::optional<Stage> only_stage(int launch) const;
  /// After `enter`.
  void launch(int index) const;

 private:
  StageMaps maps(Stage stage) const;
  LaunchQueues queues(int index) const;

  DeviceContext ctx_;
  PassTensors tensors_;
  std::int64_t rows_;
  std::vector<QueuePair> queues_;
  PassMaps maps_{};
  std::uint32_t* tickets_ = nullptr;
  int ctas_;
  int enter_ctas_;  // more copy hardly faster, and `order`, which runs beside them, waits behind
  cudaStream_t stream_;
};

}  // namespace uniep::cuda
