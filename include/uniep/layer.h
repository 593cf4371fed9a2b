#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <variant>
#include <vector>

#include "uniep/bf16.h"
#include "uniep/communicator.h"
#include "uniep/expert_matrices.h"
#include "uniep/macros.h"
#include "uniep/overflow.h"
#include "uniep/problem.h"
#include "uniep/routing_plan.h"
#include "uniep/row_pool.h"
#include "uniep/schedule.h"
#include "uniep/timeline.h"

namespace uniep {

class LayerBackend;
struct SavedData;

/// Tensors of a forward pass on one rank. T tokens of this rank, El = E / ranks local experts; all
/// row-major and contiguous, and of weights in any of the forms of ExpertMatrices. Here and below
/// results have memory of their own.
struct ForwardArgs {
  std::span<const bf16> x;            ///< [T, H]
  std::span<const float> topk_probs;  ///< [T, K]; values at dropped slots are not read
  ExpertMatrices<const bf16> w1;      ///< [El, 2I, H]: gate rows, then up rows; without a gate
                                      ///< (Problem::activation) I, here and below
  ExpertMatrices<const bf16> w2;      ///< [El, H, I]
  std::span<bf16> out;                ///< [T, H], or [T, K, H] with Problem::slot_rows
  std::span<const bf16> b1{};         ///< [El, 2I], with Problem::bias; else empty, as the next
  std::span<const bf16> b2{};         ///< [El, H]
  // The S shared experts (Problem::shared_experts), the same on all ranks; without any, empty.
  std::span<const bf16> shared_w1{};      ///< [S, 2I, H], as w1
  std::span<const bf16> shared_w2{};      ///< [S, H, I]
  std::span<const float> shared_probs{};  ///< [T, S], as topk_probs; empty: each is 1
};

/// A bf16 tensor that a weight gradient is added to: see WeightGrad.
struct Bf16MainGrad {
  ExpertMatrices<bf16> values;
};

/// Where a weight gradient goes. A bf16 tensor is overwritten. A main_grad has the fp32 sums of the
/// call added to it, and keeps its values for experts that received no rows: in fp32, or, of a
/// Bf16MainGrad, old value and sum are added in fp32 and rounded to bf16, once a call. It need not
/// have the form of its weight; that of a bias is one tensor.
using WeightGrad = std::variant<ExpertMatrices<bf16>, ExpertMatrices<float>, Bf16MainGrad>;

struct BackwardArgs {
  std::span<const bf16> dy;       ///< [T, H]
  ExpertMatrices<const bf16> w1;  ///< as in forward
  ExpertMatrices<const bf16> w2;
  std::span<bf16> dx;          ///< as out, [T, K, H] with Problem::slot_rows
  std::span<float> dprobs;     ///< [T, K]; 0 at dropped slots
  WeightGrad dw1;              ///< [El, 2I, H]
  WeightGrad dw2;              ///< [El, H, I]
  std::span<const bf16> x{};   ///< [T, H], as in forward, with Save::kNone or shared experts; else
                               ///< not read
  std::span<const bf16> b1{};  ///< as in forward; so the next
  std::span<const bf16> b2{};
  WeightGrad db1{};                   ///< [El, 2I], with Problem::bias; else empty, as the next
  WeightGrad db2{};                   ///< [El, H]
  std::span<const bf16> shared_w1{};  ///< as in forward
  std::span<const bf16> shared_w2{};
  std::span<float> dshared_probs{};  ///< [T, S]; empty: not wanted
  /// [S, 2I, H]: summed over the tokens of this rank alone, as a dense layer's are. The caller adds
  /// those of all ranks up. Both are of the kind of dw1 and dw2.
  WeightGrad dshared_w1{};
  WeightGrad dshared_w2{};  ///< [S, H, I]
};

/// What `Layer::backward_data` reads and writes of BackwardArgs ...
struct BackwardDataArgs {
  std::span<const bf16> dy;
  ExpertMatrices<const bf16> w1;
  ExpertMatrices<const bf16> w2;
  std::span<bf16> dx;
  std::span<float> dprobs;
  std::span<const bf16> x{};
  std::span<const bf16> b1{};
  std::span<const bf16> b2{};
  std::span<const bf16> shared_w1{};
  std::span<const bf16> shared_w2{};
  std::span<float> dshared_probs{};
};

/// ... and what `Layer::backward_weights` does.
struct BackwardWeightsArgs {
  WeightGrad dw1;
  WeightGrad dw2;
  WeightGrad db1{};
  WeightGrad db2{};
  WeightGrad dshared_w1{};
  WeightGrad dshared_w2{};
  // As `backward_data` had them, with shared experts, whose tokens are read in place; else not
  // read.
  std::span<const bf16> dy{};
  std::span<const bf16> x{};
};

/// What a forward pass leaves for its backward: the routing plan, the probability of each row, and
/// unless Problem::save and recompute_h say otherwise the dispatched rows of x, and h; from
/// `backward_data` to `backward_weights`, also the rows of dy, dh and a. Movable; hold one per
/// forward whose backward is still to come.
class UNIEP_API Saved {
 public:
  Saved();
  Saved(Saved&&) noexcept;
  Saved& operator=(Saved&&) noexcept;
  ~Saved();

  const RoutingPlan& plan() const;
  /// [padded_rows, 2I], without a gate [padded_rows, I]; pad rows unspecified. Empty if not kept,
  /// or in pages of a row pool.
  std::span<const bf16> h() const;
  /// Memory of uniep's own that it holds, the plan's and pages of a row pool aside.
  std::size_t bytes() const;

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

/// Memory of a layer, and of each of its steps, in bytes but for `rows`: what a caller that brings
/// its own has to bring. Of the capacity the same on all ranks.
struct MemoryNeeds {
  std::int64_t rows = 0;             ///< of StepMemory's h and row_probs
  std::int64_t rows_of_x = 0;        ///< of its x_rows
  std::int64_t symmetric = 0;        ///< of a layer, reached by peers
  std::int64_t workspace = 0;        ///< of a layer, for this rank alone
  std::int64_t plan = 0;             ///< of one routing plan
  std::int64_t forward_memory = 0;   ///< of a forward pass, until it is done
  std::int64_t backward_memory = 0;  ///< of a backward pass, until its last part is done
  std::int64_t alignment = 0;        ///< each begins at a multiple of this
};

/// The caller's memory for a layer; what is empty, uniep allocates. Larger than MemoryNeeds says is
/// accepted. Nobody else writes to it while the layer lives, whatever it held before.
struct LayerMemory {
  std::span<std::byte> workspace{};
  std::span<std::byte> symmetric{};
  /// Every rank's symmetric memory as mapped in this process, by rank, `symmetric` itself among
  /// them. Empty: a group of one needs none, and with CUDA uniep maps `symmetric` between ranks.
  std::vector<std::byte*> peers{};
  /// Called once, when nobody reaches `symmetric` through this layer any more; not where the layer
  /// could not be made. It must not throw. Of given `peers`, when this rank's layer has ended.
  std::function<void()> release{};
};

/// The caller's memory for one step: a plan, what its forward saves, and what its passes work in.
/// What is empty, uniep allocates. What a call uses of it shares no byte with the call's tensors or
/// with each other. Calls write it in stream order, and a backward pass only needs the contents of
/// what forward saved: they may be moved to other addresses meanwhile, each for itself
/// (`Layer::restore`).
///
/// There may be fewer rows than the capacity, if there is room for those that came:
/// RoutingPlan::padded_rows(), which waits for the device. All that has rows then has as many, a
/// multiple of Problem::row_align, in forward and in its backward. Of received tokens there may be
/// as few as RoutingPlan::received_tokens().
struct StepMemory {
  std::span<std::byte> plan{};  ///< MemoryNeeds::plan
  /// [rows, H], or with Save::kTokens [received tokens, H]; this and the next two come together,
  /// but for what the layer does not keep (Problem::save, recompute_h), which stays empty.
  std::span<bf16> x_rows{};
  std::span<bf16> h{};           ///< [rows, 2I]; without a gate [rows, I]
  std::span<float> row_probs{};  ///< [rows], which says how many rows there are
  /// MemoryNeeds::forward_memory. Nobody reads it when forward is done.
  std::span<std::byte> forward_memory{};
  /// MemoryNeeds::backward_memory, read from `backward_data` to `backward_weights`. `backward`
  /// leaves nothing there that is read. Given to `backward_weights`: what the `backward_data` was
  /// given whose weight gradients it computes; else those of the last one are.
  std::span<std::byte> backward_memory{};
};

/// The events of a pass whose tokens come in waves (Problem::gathered_hosts), with CUDA: a
/// cudaEvent_t a wave, or null. Empty: all is there, and nobody is told. See Layer.
struct WaveEvents {
  std::vector<void*> before{};  ///< the wave's tokens are there when this is
  std::vector<void*> after{};   ///< recorded when all that the wave writes is there
};

/// What may differ from call to call.
struct CallOptions {
  std::optional<Schedule> schedule{};  ///< of a pass; nothing: Layer::schedule
  /// The cudaStream_t of the call's launches; nothing: LayerOptions::cuda_stream.
  std::optional<void*> cuda_stream{};
  StepMemory memory{};  ///< what this call writes of it
  /// Null, or an array of two that `plan` writes, where the tensors lie (device memory, with CUDA):
  /// [0] an Overflow, the same on all ranks;
  /// [1] what would do, as Overflow says: of rows the capacity, whether they fit or not, that is
  ///     those of the rank that receives most, padding included.
  /// A routing that cannot be planned is then no error of any call. A forward pass of such a plan
  /// fills `out` with NaN; a backward pass fills dx with NaN, and dprobs and weight gradients that
  /// are overwritten with 0, and leaves those that are added to as they are.
  std::int64_t* overflow = nullptr;
  /// Whether a backward pass, or a part of one, of a layer with a row pool leaves `saved` its
  /// pages, for another. The last one to come gives them back, or else the end of `saved`.
  bool keep_pages = false;
  WaveEvents waves{};  ///< of a pass, or the part of one that moves data
};

struct LayerOptions {
  bool record_timeline = false;  ///< keep a TimelineEvent per task; see Layer::take_timeline
  int timeout_ms = 0;            ///< limit of every wait; 0: UNIEP_TIMEOUT_MS, else 30000
  /// The cudaStream_t of calls that name none; null: the default stream, which cannot be captured
  /// in a CUDA graph.
  void* cuda_stream = nullptr;
  FaultInjection fault_injection{};
  /// The schedule of passes that are given none, in both directions, on all ranks; nothing: looked
  /// up, see Layer::schedule.
  std::optional<Schedule> schedule{};
  LayerMemory memory{};
  /// The pool in which plans of this layer have room for what forward saves; all ranks have one, or
  /// none. Without, each forward allocates for itself.
  ///
  /// With a pool a plan serves one forward pass. `plan` refuses a routing for which a rank's pool
  /// is too full, on all ranks alike, before anything is written: Error(kCapacity) that names the
  /// bytes that would do. Pages go back after the backward pass that reads them last, or with the
  /// end of Saved, or of the plan; a backward pass that is to be repeated keeps them
  /// (CallOptions::keep_pages). Plans and what forward saves are not in the caller's memory then.
  ///
  /// Plans of layers that share pools are made in the same order on all ranks. With CUDA all calls
  /// of layers that share one run in the order in which they are made, whatever streams they are
  /// on; a stream lives until another call of such a layer has been made on another, or all of them
  /// have ended. In CUDA graphs every replay takes pages and gives them back: what reads them comes
  /// between the replay of their plan and that of the backward pass that gives them back.
  std::optional<RowPool> row_pool{};
  CudaErf erf = CudaErf::kBefore13_2;  ///< all ranks have the same; on a CPU it changes nothing
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
/// nothing, one of them or `synchronize` throws, and the layer stays usable (CallOptions::overflow
/// makes it a value instead).
///
/// **Streams.** Each call goes to the stream that it is given. Where consecutive calls go to
/// different ones, the later waits on the device for all that was put on the earlier's stream
/// before it; so calls run in the order in which they were made, and memory can be handed from one
/// to the next. How long a stream must live, docs/api.md says (Streams).
///
/// **Tokens that come in waves.** With Problem::gathered_hosts N > 1, tokens of N hosts are
/// gathered in x and dy ahead of a pass. With `first_host` f it may begin when those of f are
/// there. It takes tokens in waves, each in a launch of its own: forward the second half of all
/// ranks' tokens of f, those of the host behind f, the next, and so on, then the first half of f's;
/// backward those of f, the next, and so on. CallOptions::waves says what a wave waits for on this
/// rank's stream. Of x, or dy, it reads its own tokens alone; ids, probabilities and, in backward,
/// x are all there. Behind the last wave `out` has all tokens. In forward it has those of the other
/// hosts before: of two, behind wave 1; of more, whose last has wave N, and wave N - 1 ahead of it
/// for what of its tokens belongs together with others', behind wave N - 1 those of all other hosts
/// but the last, and behind wave N those of the last.
///
/// **CUDA graphs.** Between cudaStreamBeginCapture and cudaStreamEndCapture on a call's stream,
/// plan, forward and backward can be captured, in any capture mode, together or in graphs of their
/// own; replays count as calls on all ranks alike, and may take turns with calls that are not
/// captured. The caller orders replays and calls, on one stream or by events: the layer does not
/// see replays, and makes no stream wait across the begin or end of a capture. A replay reads
/// routing and tensors where they lay in the capture: put other values there, in the same numbers
/// of tokens. The plan, the Saved, the layer, and memory that calls were given live at least as
/// long as the graph. A capture allocates nothing: of what one step takes, all is there from the
/// layer's construction (given a workspace, only what goes there); more plans or Saved at a time
/// have to be held once outside of a capture first. What goes wrong in a replay comes out of the
/// next call or of `synchronize` (a routing that cannot be planned: as above); a refusal in the
/// capture itself is that rank's alone, since nothing runs. The accessors of a captured plan that
/// depend on the routing throw Error(kUnsupported), as `synchronize`, `last_pass` and
/// `take_timeline` do during the capture; `last_pass` has no times and bytes of a captured pass.
class UNIEP_API Layer {
 public:
  /// Collective. Throws Error(kInvalidArgument) where problem or `options.schedule` are invalid or
  /// differ by rank.
  Layer(const Problem& problem, Communicator communicator, const LayerOptions& options = {});
  Layer(Layer&&) noexcept;
  Layer& operator=(Layer&&) noexcept;
  ~Layer();

  /// Memory of layers of this problem in a group of `num_ranks`, and of steps with `rows` rows, a
  /// multiple of Problem::row_align up to the capacity; nothing: the capacity. No rows take as much
  /// as row_align, since empty memory is memory that is not given. On several `hosts` the symmetric
  /// memory, which is uniep's own there, has a part for each rank that this one stands in for.
  /// Throws Error(kInvalidArgument) where the problem, `rows` or `hosts` is invalid, and
  /// Error(kUnsupported) where this build lacks the backend, or that has no groups on several
  /// hosts.
  static MemoryNeeds memory_needs(const Problem& problem, Backend backend, int num_ranks,
                                  std::optional<std::int64_t> rows = {}, int hosts = 1);

  /// Collective. `topk_ids` is this rank's [T, K]; T follows from its size, and is 0 to max_tokens.
  /// A routing that has an impossible id, or brings a rank more rows than it has room for, is
  /// refused on all ranks: Error(kInvalidArgument), or Error(kCapacity) that names the
  /// `capacity_rows` that would do. With CUDA that error comes later, as said above, and passes of
  /// such a plan write nothing, main_grad included.
  RoutingPlan plan(std::span<const std::int32_t> topk_ids, const CallOptions& options = {});

  /// Collective. Writes `args.out`. Without a schedule: under `schedule(Pass::kForward)`.
  Saved forward(const RoutingPlan& plan, const ForwardArgs& args);
  Saved forward(const RoutingPlan& plan, const ForwardArgs& args, const Schedule& schedule);
  Saved forward(const RoutingPlan& plan, const ForwardArgs& args, const CallOptions& options);

  /// What forward saved, from the caller's memory to which it was written, or to which its contents
  /// were moved: `memory` has plan, x_rows, h and row_probs, of a forward pass of `tokens` tokens
  /// on this rank, with as many rows, and backward_memory where `backward_weights` comes next.
  /// `flagged`: its plan was given CallOptions::overflow. Throws Error(kInvalidArgument) where the
  /// memory is too small or misaligned or, on the CPU, does not hold such a plan.
  Saved restore(const StepMemory& memory, std::int64_t tokens, bool flagged = false);

  /// Collective. Writes dx, dprobs and the weight gradients. May be repeated on the same `saved`;
  /// with a row pool, after calls that kept its pages.
  /// Without a schedule, here and below: under `schedule(Pass::kBackward)`.
  void backward(const Saved& saved, const BackwardArgs& args);
  void backward(const Saved& saved, const BackwardArgs& args, const Schedule& schedule);
  void backward(const Saved& saved, const BackwardArgs& args, const CallOptions& options);

  /// `backward` in two parts, as pipeline-parallel schedules need it: other ranks wait for the
  /// first alone, and the second can fill a wait later on. Together they give the bits of
  /// `backward`.
  ///
  /// Not for a layer with Problem::backward_rows: Error(kInvalidArgument).
  ///
  /// Collective. Writes dx and dprobs. `saved` then holds, beside what forward left there, a step's
  /// rows of dy, dh and a (2 (H + 3I) bytes each, and some), until `backward_weights` or its own
  /// end; with a second `backward_data`, those of the second. Other steps may come in between.
  void backward_data(Saved& saved, const BackwardDataArgs& args);
  void backward_data(Saved& saved, const BackwardDataArgs& args, const Schedule& schedule);
  void backward_data(Saved& saved, const BackwardDataArgs& args, const CallOptions& options);

  /// Writes the weight gradients of the last `backward_data` on the same `saved`, whose rows it
  /// then lets go; Error(kInvalidArgument) where there was none since the last call, unless
  /// StepMemory::backward_memory is given, which is taken for that of one. Not collective: it needs
  /// nothing of other ranks. The schedule may be another.
  void backward_weights(Saved& saved, const BackwardWeightsArgs& args);
  void backward_weights(Saved& saved, const BackwardWeightsArgs& args, const Schedule& schedule);
  void backward_weights(Saved& saved, const BackwardWeightsArgs& args, const CallOptions& options);

  /// The schedule of passes of a direction that are given none: `LayerOptions::schedule`, or else
  /// the first that can run of what `uniep tune` found on this machine for such a layer (up to the
  /// same power of two of `max_tokens`, least uneven routing), what is shipped for this device,
  /// what the cost model of the device expects most of, and `default_schedule`. Rank 0 looks it up
  /// for all ranks while the layer is made, and it stays. Nothing is measured; if the model is
  /// asked, a process' first layer of a problem takes seconds longer. What of the user's file of
  /// tuned schedules (UNIEP_TUNE_CACHE) cannot be used is said once on stderr, and ignored.
  const Schedule& schedule(Pass pass) const;

  /// Waits until everything that this rank was asked for is done, and throws the error of what
  /// failed on the way. On the CPU calls are done when they return.
  void synchronize();

  const Problem& problem() const;
  const Communicator& communicator() const;

  /// The times and traffic of this rank's last pass; of a backward pass in two parts, of the last
  /// part.
  const PassStats& last_pass() const;

  /// Events of all passes since the last call, in no particular order; empty unless
  /// `record_timeline`. Of replayed CUDA graphs, those of the last pass that ran.
  std::vector<TimelineEvent> take_timeline();

  /// Library-internal.
  LayerBackend& backend() { return *backend_; }

 private:
  CallOptions complete(const CallOptions& options, Pass pass) const;

  std::unique_ptr<LayerBackend> backend_;
  std::array<Schedule, 2> schedules_;  // by Pass
};

}  // namespace uniep
