// Enter: what a pass does before its first task. Notes where the counters stand, stages this rank's
// tokens where peers, if there are any, pull them, zeroes the rows that weight gradients read past
// an expert's last, and tells every rank that the tokens are there. It runs beside `order`, whose
// arrays it has no use for, and ends behind it, so that what follows one follows both. If tokens
// come in waves, each has an enter of its own, of which the first does all that is no token's.
#include <utility>

#include "cuda/device/fault_fill.cuh"
#include "cuda/device/fault_injection.cuh"
#include "cuda/device/refusal.cuh"
#include "cuda/device/sm90/tile_shape.h"
#include "cuda/kernels/start_kernel.h"
#include "cuda/pass_kernels.h"
#include "schedule/token_waves.h"

namespace uniep::cuda {
namespace {

constexpr int kEnterThreads = 256;
/// Rows that a weight gradient takes at a time.
constexpr std::int64_t kRowStep = kTileK;

__device__ __forceinline__ std::int64_t global_thread() {
  return std::int64_t{blockIdx.x} * kEnterThreads + threadIdx.x;
}
__device__ __forceinline__ std::int64_t global_threads() {
  return std::int64_t{gridDim.x} * kEnterThreads;
}

/// Copies with several loads of a thread under way at a time.
__device__ __forceinline__ void copy_vectors(void* to, const void* from, std::int64_t bytes) {
  constexpr int kAhead = 4;
  auto* target = static_cast<uint4*>(to);
  const auto* source = static_cast<const uint4*>(from);
  const std::int64_t count = bytes / 16;
  const std::int64_t step = global_threads();
  for (std::int64_t first = global_thread(); first < count; first += kAhead * step) {
    uint4 values[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (first + i * step < count) values[i] = __ldcs(source + first + i * step);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (first + i * step < count) target[first + i * step] = values[i];
    }
  }
}

template <class T>
__device__ __forceinline__ void copy_elements(T* to, const T* from, std::int64_t count) {
  for (std::int64_t i = global_thread(); i < count; i += global_threads()) to[i] = from[i];
}

/// A token's probabilities: of its K experts, then of the shared ones.
__device__ __forceinline__ void stage_probs_of_slots(const DeviceContext& ctx, float* to) {
  const PassView& v = ctx.view;
  const float* routed = ctx.get<Tensor::kTopkProbs>();
  const float* shared = ctx.get<Tensor::kSharedProbs>();
  const auto count = static_cast<int>(v.tokens * v.slots);  // fits: unsupported_reason(Problem)
  for (std::int64_t i = global_thread(); i < count; i += global_threads()) {
    const int token = static_cast<int>(i) / v.slots;
    const int slot = static_cast<int>(i) % v.slots;
    if (slot < v.topk) {
      to[i] = routed[std::int64_t{token} * v.topk + slot];
    } else {
      to[i] = shared == nullptr ? 1.0f : shared[token * v.shared_experts + slot - v.topk];
    }
  }
}

template <int kind>
__device__ __forceinline__ void note_base(const DeviceContext& ctx) {
  constexpr CounterOf kOf = kLayerGraph.counters[kind].of;
  const std::uint32_t* counters = ctx.counters.first[kind];
  std::uint32_t* base = ctx.counters.base[kind];
  if constexpr (kOf == CounterOf::kSource) {
    // Only this rank raises its own, once a pass.
    if (global_thread() == 0) *base = counters[ctx.view.rank];
  } else {
    copy_elements(base, counters, num_counters(ctx.view, kOf));
  }
}

template <int... kinds>
__device__ __forceinline__ void note_bases(const DeviceContext& ctx,
                                           std::integer_sequence<int, kinds...>) {
  (note_base<kinds>(ctx), ...);
}

/// Whether the pass has such a stage.
__device__ __forceinline__ bool has(const PassView& v, Stage stage) {
  return v.stage(stage).grid != TileGrid::kNone;
}

__device__ __forceinline__ void zero_draws(const PassView& v, const EnterArgs& args) {
  const std::int64_t launches = num_launches(v);
  for (std::int64_t i = global_thread(); i < launches; i += global_threads()) args.drawn[i] = 0;
}

/// Zeroes a row of the expert, unless its tokens are in place: then nobody reads the row.
template <Tensor t>
__device__ __forceinline__ void zero_row(const DeviceContext& ctx, int expert, std::int64_t row) {
  if (is_in_place<t>(ctx.view, expert)) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  auto* to = reinterpret_cast<uint4*>(ctx.get<t>() + ctx.row<t>(row) * ctx.view.hidden);
  for (std::int64_t c = lane; c < ctx.view.hidden / 8; c += 32) to[c] = uint4{0, 0, 0, 0};
}

/// Zeroes the rows behind each expert's last, up to a whole step: a warp for each that there may
/// be.
__device__ __forceinline__ void zero_pad_rows(const DeviceContext& ctx) {
  const PassView& v = ctx.view;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t rows = v.num_local_experts * kRowStep;
  for (std::int64_t i = global_thread() / 32; i < rows; i += global_threads() / 32) {
    const auto expert = static_cast<int>(i / kRowStep);
    const std::int64_t tokens = v.tokens_per_expert[expert];
    const std::int64_t row = tokens / kRowStep * kRowStep + i % kRowStep;  // of the last step's
    if (tokens % kRowStep == 0 || row < tokens) continue;
    const std::int64_t pad_row = v.segment_begin[expert] + row;
    if (v.pass == Pass::kForward) {
      zero_row<Tensor::kXRows>(ctx, expert, pad_row);
      if (lane == 0) ctx.get<Tensor::kRowProbs>()[ctx.row<Tensor::kRowProbs>(pad_row)] = 0;
    } else {
      zero_row<Tensor::kDyRows>(ctx, expert, pad_row);
      if (has(v, Stage::kRedispatch) || has(v, Stage::kExpand)) {
        zero_row<Tensor::kXRows>(ctx, expert, pad_row);
      }
    }
  }
}

/// The last CTA to be done publishes for all of them.
__device__ __forceinline__ void publish_behind_last(const DeviceContext& ctx,
                                                    std::uint32_t* ctas_done) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence_system();
    last = atomicAdd(ctas_done, 1u) + 1 == gridDim.x;
    __threadfence_system();  // what the others counted is seen by all threads behind the barrier
  }
  __syncthreads();
  const int peer = static_cast<int>(threadIdx.x);
  if (!last || peer >= ctx.view.num_ranks) return;
  if (peer == 0) *ctas_done = 0;
  // A tile per rank that is told.
  if (!may_signal(ctx.fault_injection, {Stage::kEnter, peer})) return;
  ptx::fence_system();
  for_each_counter<kSignalsOf<Stage::kEnter>>([&](CounterKind kind) {
    const Signal s = source_signal(ctx.view, kind, peer);
    ptx::add_release_system(ctx.counter(s), s.amount);
  });
}

/// All but the tokens.
__device__ __forceinline__ void begin_pass(const DeviceContext& ctx, const EnterArgs& args) {
  const PassView& v = ctx.view;
  if (global_thread() == 0) begin_call(ctx.calls);
  note_bases(ctx, std::make_integer_sequence<int, kNumCounterKinds>());
  zero_draws(v, args);
  const Peer own = ctx.peer(v.rank);
  if (v.num_ranks > 1 && has(v, Stage::kRedispatch)) {
    copy_vectors(own.get<Tensor::kXTokens>(), ctx.get<Tensor::kX>(),
                 v.tokens * v.hidden * sizeof(bf16));
  }
  if (const float* probs = ctx.get<Tensor::kTopkProbs>(); probs != nullptr) {
    if (v.shared_experts > 0) {
      stage_probs_of_slots(ctx, own.get<Tensor::kProbs>());
    } else {
      copy_elements(own.get<Tensor::kProbs>(), probs, v.tokens * v.topk);
    }
  }
  // In a ring dispatch does that for each expert, once it has room.
  if (v.ring_rows == 0) zero_pad_rows(ctx);
}

/// Copies the tokens that come with the wave, or all if tokens do not come in waves, to where peers
/// read them.
__device__ __forceinline__ void stage_tokens(const DeviceContext& ctx, int wave) {
  const PassView& v = ctx.view;
  if (v.num_ranks == 1) return;  // dispatch reads them where they are
  TokenRun run{0, v.tokens};
  if (v.comes_in_waves()) run = own_tokens_that_come(v, wave);
  const bf16* tokens = ctx.get_of_pass<Tensor::kX, Tensor::kDy>();
  const std::int64_t first = run.begin * v.hidden;
  copy_vectors(ctx.peer(v.rank).get<Tensor::kTokens>() + first, tokens + first,
               (run.end - run.begin) * v.hidden * sizeof(*tokens));
}

__global__ void __launch_bounds__(kEnterThreads)
    enter_kernel(const __grid_constant__ DeviceContext ctx,
                 const __grid_constant__ EnterArgs args) {
  // A plan that cannot be used is so on every rank, and has no tasks: no rank counts this pass. Nor
  // does a rank that has failed, whose peers must not take its next tokens for those before.
  const bool unusable = args.plan != nullptr && !args.plan->ok();
  if (unusable || ptx::load_relaxed_gpu(ctx.failed) != 0) {
    if (unusable && args.plan->expired == 0) {
      fill_of_fault(args.fill, global_thread(), global_threads());
    }
    return ptx::wait_for_last_launch();
  }
  if (args.wave == 0) begin_pass(ctx, args);
  stage_tokens(ctx, args.wave);
  publish_behind_last(ctx, args.ctas_done);
  ptx::wait_for_last_launch();
}

}  // namespace

cudaError_t prepare_enter() { return load_kernel(enter_kernel); }

cudaError_t launch_enter(const DeviceContext& ctx, const EnterArgs& args, int ctas,
                         cudaStream_t stream) {
  const LaunchSize size{.ctas = ctas, .threads = kEnterThreads};
  // The first is beside `order`. Others read what the stream has waited for.
  const cudaLaunchAttribute attribute =
      args.wave == 0 ? beside_last_launch() : resident_together(false);
  return launch_kernel(enter_kernel, size, attribute, stream, ctx, args);
}

}  // namespace uniep::cuda
