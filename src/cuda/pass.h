#pragma once

#include <cuda_runtime.h>

#include <optional>
#include <string>
#include <vector>

#include "cuda/pass_kernels.h"
#include "cuda/pass_tensors.h"
#include "uniep/layer.h"

namespace uniep::cuda {

/// What the CUDA backend lacks for this schedule on a device where a pass may hold `sms` SMs, or
/// nothing where it can run it.
std::optional<std::string> unsupported_reason(const Schedule& schedule, int sms);
/// What the backend lacks for a backward pass of this problem, if that has a ring of rows.
std::optional<std::string> unsupported_ring_reason(const Schedule& schedule, const Problem& problem,
                                                   int sms);
/// What the backend lacks for how weights lie, and for where their gradients go.
std::optional<std::string> unsupported_reason(const ForwardArgs& args, const Problem& problem);
std::optional<std::string> unsupported_reason(const BackwardDataArgs& args, const Problem& problem);
std::optional<std::string> unsupported_reason(const BackwardWeightsArgs& args,
                                              const Problem& problem);

/// CTAs of each launch of a pass that may hold `sms` SMs.
int num_ctas(const Schedule& schedule, int sms);

/// All that a pass, or its part at hand, would write for the caller, main gradients aside.
FaultFill fault_fill(const PassView& view, const PassTensors& tensors);

/// Loads all kernels of plans and passes onto this thread's device.
void prepare_kernels();

/// One pass on one rank, as launches on a stream. The host waits for nothing.
class PassLauncher {
 public:
  /// What tensors have room for.
  struct Rows {
    std::int64_t of_call = 0;
    std::int64_t saved = 0;
  };

  /// `ctx` has everything but the tensors; `queues` has the tables of every launch, in order;
  /// `expert_maps` has that of PassScratchLayout.
  PassLauncher(const DeviceContext& ctx, const PassTensors& tensors, const Rows& rows,
               CUtensorMap* expert_maps, std::vector<LaunchQueues> queues, int sms,
               cudaStream_t stream);

  /// Writes the maps of experts' matrices if they lie apart; comes before all else. `flagged`: the
  /// plan's status, if it may have a fault that is no error.
  void write_expert_maps(const PlanStatus* flagged) const;
  /// Stages and publishes the tokens, where this part of the pass has any, and zeroes the counts of
  /// draws.
  void enter(const EnterArgs& args);
  int num_launches() const { return static_cast<int>(queues_.size()); }
  /// Launches that each have a wave of tokens (token_waves.h), if tokens come in waves.
  int num_waves() const;
  /// Stages and publishes the tokens of any wave but the first, before its launch.
  void enter_wave(int wave) const;
  /// The stage of a launch that holds one only.
  std::optional<Stage> only_stage(int launch) const;
  /// Puts a launch on the stream; comes after `enter`.
  void launch(int index) const;

 private:
  DeviceContext ctx_;
  EnterArgs enter_{};
  PassTensors tensors_;
  std::vector<LaunchQueues> queues_;
  MappedPass mapped_;
  int ctas_;
  int enter_ctas_;  // more copy hardly faster, and `order`, which runs beside them, waits behind
  cudaStream_t stream_;
};

}  // namespace uniep::cuda
