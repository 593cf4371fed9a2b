#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <variant>
#include <vector>

#include "uniep/bf16.h"
#include "uniep/communicator.h"
#include "uniep/macros.h"
#include "uniep/problem.h"
#include "uniep/routing_plan.h"
#include "uniep/schedule.h"
#include "uniep/timeline.h"

namespace uniep {

class LayerBackend;
struct SavedData;

/// Tensors of a forward pass on one rank. T tokens of this rank, El = E / ranks local experts; all
/// row-major and contiguous.
struct ForwardArgs {
  std::span<const bf16> x;            ///< [T, H]
  std::span<const float> topk_probs;  ///< [T, K]; values at dropped slots are not read
  std::span<const bf16> w1;           ///< [El, 2I, H]: gate rows, then up rows
  std::span<const bf16> w2;           ///< [El, H, I]
  std::span<bf16> out;                ///< [T, H]
};

/// Where a weight gradient goes: a bf16 tensor is overwritten; an fp32 tensor (a main_grad) has the
/// fp32 sums added to it, and keeps its values for experts that received no rows.
using WeightGrad = std::variant<std::span<bf16>, std::span<float>>;

struct BackwardArgs {
  std::span<const bf16> dy;  ///< [T, H]
  std::span<const bf16> w1;  ///< as in forward
  std::span<const bf16> w2;
  std::span<bf16> dx;       ///< [T, H]
  std::span<float> dprobs;  ///< [T, K]; 0 at dropped slots
  WeightGrad dw1;           ///< [El, 2I, H]
  WeightGrad dw2;           ///< [El, H, I]
};

/// Of BackwardArgs, what `Layer::backward_data` reads and writes ...
struct BackwardDataArgs {
  std::span<const bf16> dy;
  std::span<const bf16> w1;
  std::span<const bf16> w2;
  std::span<bf16> dx;
  std::span<float> dprobs;
};

/// ... and what `Layer::backward_weights` does.
struct BackwardWeightsArgs {
  WeightGrad dw1;
  WeightGrad dw2;
};

/// What a forward pass leaves for its backward: the routing plan, the dispatched rows of x, h and
/// the probability of each row; from `backward_data` to `backward_weights`, also the rows of dy, dh
/// and a. Movable; hold one per forward whose backward is still to come.
class UNIEP_API Saved {
 public:
  Saved();
  Saved(Saved&&) noexcept;
  Saved& operator=(Saved&&) noexcept;
  ~Saved();

  const RoutingPlan& plan() const;
  std::span<const bf16> h() const;  ///< [padded_rows, 2I]; pad rows are unspecified
  std::size_t bytes() const;        ///< memory that it holds, the plan's aside

  /// Library-internal.
  explicit Saved(std::unique_ptr<SavedData> data);
  const SavedData* data() const { return data_.get(); }
  SavedData* data() { return data_.get(); }

 private:
  std::unique_ptr<SavedData> data_;
};

/// Hooks for tests of the protocol; everything off by default. With CUDA, `plan` is not disturbed.
struct FaultInjection {
  int max_delay_us = 0;    ///< random delay of up to this before each wait and each signal
  std::uint64_t seed = 0;  ///< of these delays
  int withhold_rank = -1;  ///< this rank computes, but never signals ...
  Stage withhold_stage = Stage::kDispatch;  ///< ... the tasks of this stage ...
  std::int64_t withhold_tile = 0;           ///< ... that have this tile index
  std::uint32_t first_count = 0;  ///< where every counter starts, on all ranks; close to 2^32 it
                                  ///< wraps
};

struct LayerOptions {
  bool record_timeline = false;  ///< keep a TimelineEvent per task; see Layer::timeline
  int timeout_ms = 0;            ///< limit of every wait; 0: UNIEP_TIMEOUT_MS, else 30000
  void* cuda_stream = nullptr;   ///< the cudaStream_t of all launches; null: the default stream,
                                 ///< which cannot be captured in a CUDA graph
  FaultInjection faults{};
  /// Of passes that are given none, in both directions, on all ranks; nothing: looked up, see
  /// Layer::schedule.
  std::optional<Schedule> schedule{};
};

/// One MoE layer on one rank. Every member function that is marked collective must be called by all
/// ranks of the group in the same order, with the same problem and schedule; when one rank's
/// arguments are refused, every rank gets that error, nothing has been written, and the layer stays
/// usable. After a timeout or a failure inside a pass the whole group is unusable, and every later
/// call says so.
///
/// With a CUDA communicator all tensors lie in device memory, those of rows (all but [T, K]) at
/// multiples of 16 bytes; calls put launches on a stream and return, and errors of the device come
/// out of the next call or of `synchronize`. Ranks do not compare their arguments in each call,
/// which would take the host. A rank that refuses its own tells the others, whose waits end at once
/// and who throw the same sentence; by then they may have written results, so the group is
/// unusable. A routing that cannot be planned (`plan`) all ranks find alike: passes of its plan do
/// nothing, one of them or `synchronize` throws, and the layer stays usable.
///
/// **CUDA graphs.** Between cudaStreamBeginCapture and cudaStreamEndCapture on `cuda_stream`, plan,
/// forward and backward can be captured, in any capture mode, together or in graphs of their own;
/// replays, on that stream, count as calls on all ranks alike, and may take turns with calls that
/// are not captured. A replay reads routing and tensors where they lay in the capture: put other
/// values there, in the same numbers of tokens. The plan, the Saved and the layer live at least as
/// long as the graph. A capture allocates nothing: of what one step takes, all is there from the
/// layer's construction; more plans or Saved at a time have to be held once outside of a capture
/// first. What goes wrong in a replay comes out of the next call or of `synchronize` (a routing
/// that cannot be planned: as above); a refusal in the capture itself is that rank's alone, since
/// nothing runs. The accessors of a captured plan that depend on the routing throw
/// Error(kUnsupported), as `synchronize`, `last_pass` and `take_timeline` do during the capture;
/// `last_pass` has no times and bytes of a captured pass.
class UNIEP_API Layer {
 public:
  /// Collective. Throws Error(kInvalidArgument) where problem or `options.schedule` are invalid or
  /// differ by rank.
  Layer(const Problem& problem, Communicator communicator, const LayerOptions& options = {});
  Layer(Layer&&) noexcept;
  Layer& operator=(Layer&&) noexcept;
  ~Layer();

  /// Collective. `topk_ids` is this rank's [T, K]; T follows from its size, and is 0 to max_tokens.
  /// A routing that has an impossible id, or brings a rank more rows than it has room for, is
  /// refused on all ranks: Error(kInvalidArgument), or Error(kCapacity) that names the
  /// `capacity_rows` that would do. With CUDA that error comes later, as said above, and passes of
  /// such a plan write nothing, main_grad included.
  RoutingPlan plan(std::span<const std::int32_t> topk_ids);

  /// Collective. Writes `args.out`. Without a schedule: under `schedule(Pass::kForward)`.
  Saved forward(const RoutingPlan& plan, const ForwardArgs& args);
  Saved forward(const RoutingPlan& plan, const ForwardArgs& args, const Schedule& schedule);

  /// Collective. Writes dx, dprobs and the weight gradients. May be repeated on the same `saved`.
  /// Without a schedule, here and below: under `schedule(Pass::kBackward)`.
  void backward(const Saved& saved, const BackwardArgs& args);
  void backward(const Saved& saved, const BackwardArgs& args, const Schedule& schedule);

  /// `backward` in two parts, as pipeline-parallel schedules need it: other ranks wait for the
  /// first alone, and the second can fill a wait later on. Together they give the bits of
  /// `backward`.
  ///
  /// Collective. Writes dx and dprobs. `saved` then holds, beside what forward left there, a step's
  /// rows of dy, dh and a (2 (H + 3I) bytes each, and some), until `backward_weights` or its own
  /// end; with a second `backward_data`, those of the second. Other steps may come in between.
  void backward_data(Saved& saved, const BackwardDataArgs& args);
  void backward_data(Saved& saved, const BackwardDataArgs& args, const Schedule& schedule);

  /// Writes the weight gradients of the last `backward_data` on the same `saved`, whose rows it
  /// then lets go; Error(kInvalidArgument) where there was none since the last call. Not
  /// collective: it needs nothing of other ranks. The schedule may be another.
  void backward_weights(Saved& saved, const BackwardWeightsArgs& args);
  void backward_weights(Saved& saved, const BackwardWeightsArgs& args, const Schedule& schedule);

  /// Of passes of a direction that are given none: `LayerOptions::schedule`, or else the first that
  /// can run of what `uniep tune` found on this machine for such a layer (up to the same power of
  /// two of `max_tokens`, least uneven routing), what is shipped for this device, what the cost
  /// model of the device expects most of, and `default_schedule`. Rank 0 looks it up for all ranks
  /// while the layer is made, and it stays. Nothing is measured; where the model is asked, a
  /// process' first layer of a problem takes seconds longer. What of the user's file of tuned
  /// schedules (UNIEP_TUNE_CACHE) cannot be used is said once on stderr, and ignored.
  const Schedule& schedule(Pass pass) const;

  /// Waits until everything that this rank was asked for is done, and throws the error of what
  /// failed on the way. On the CPU calls are done when they return.
  void synchronize();

  const Problem& problem() const;
  const Communicator& communicator() const;

  /// Of this rank's last pass; of a backward pass in two parts, of the last part.
  const PassStats& last_pass() const;

  /// Events of all passes since the last call, in no particular order; empty unless
  /// `record_timeline`. Of replayed CUDA graphs, those of the last pass that ran.
  std::vector<TimelineEvent> take_timeline();

 private:
  std::unique_ptr<LayerBackend> backend_;
  std::array<Schedule, 2> schedules_;  // by Pass
};

}  // namespace uniep
