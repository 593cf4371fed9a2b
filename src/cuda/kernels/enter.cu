// Enter: what a pass does before its first task. Stages this rank's tokens where peers pull them,
// notes where the counters stand, zeroes the rows that weight gradients read past an expert's last,
// and tells every rank that the tokens are there. It begins beside `order`, whose arrays it needs
// only behind the copies.
#include "cuda/device/faults.cuh"
#include "cuda/device/refusal.cuh"
#include "cuda/kernels/load.h"
#include "cuda/launch.h"

namespace uniep::cuda {
namespace {

constexpr int kEnterThreads = 256;
/// Rows that a weight gradient takes at a time.
constexpr std::int64_t kRowStep = 64;

__device__ __forceinline__ std::int64_t global_thread() {
  return std::int64_t{blockIdx.x} * kEnterThreads + threadIdx.x;
}
__device__ __forceinline__ std::int64_t global_threads() {
  return std::int64_t{gridDim.x} * kEnterThreads;
}

/// With several loads of a thread under way at a time.
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

__device__ __forceinline__ void note_bases(const DeviceContext& ctx, const EnterArgs& args) {
  const PassView& v = ctx.view;
  const std::int64_t rows = v.segment_begin[v.num_local_experts];
  copy_elements(args.rows_ready_base, ctx.counters.rows_ready,
                ceil_div<std::int64_t>(rows, v.rows_per_counter()));
  copy_elements(args.tile_done_base, ctx.counters.tile_done, v.tile_begin[v.num_blocks()]);
  copy_elements(args.expert_done_base, ctx.counters.expert_done, v.num_local_experts);
  copy_elements(args.arrived_base, ctx.at<std::uint32_t>(v.rank, ctx.symmetric.arrived),
                v.num_token_blocks() * v.num_ranks);
  // Only this rank raises its own `published`, once a pass.
  if (global_thread() == 0) {
    *args.published_base = ctx.at<std::uint32_t>(v.rank, ctx.symmetric.published)[v.rank];
  }
  const std::int64_t launches = num_launches(v);
  for (std::int64_t i = global_thread(); i < launches; i += global_threads()) args.tickets[i] = 0;
}

/// One CTA per expert in turn.
__device__ __forceinline__ void zero_pad_rows(const DeviceContext& ctx) {
  const PassView& v = ctx.view;
  for (int e = blockIdx.x; e < v.num_local_experts; e += gridDim.x) {
    const std::int64_t begin = v.segment_begin[e] + v.tokens_per_expert[e];
    const std::int64_t end =
        v.segment_begin[e] + round_up<std::int64_t>(v.tokens_per_expert[e], kRowStep);
    auto* rows = reinterpret_cast<uint4*>(ctx.dispatched + begin * v.hidden);
    for (std::int64_t i = threadIdx.x; i < (end - begin) * v.hidden / 8; i += kEnterThreads) {
      rows[i] = uint4{0, 0, 0, 0};
    }
    if (v.pass == Pass::kForward) {
      for (std::int64_t r = begin + threadIdx.x; r < end; r += kEnterThreads) ctx.row_probs[r] = 0;
    }
  }
}

__global__ void __launch_bounds__(kEnterThreads)
    enter_kernel(const __grid_constant__ DeviceContext ctx,
                 const __grid_constant__ EnterArgs args) {
  const PassView& v = ctx.view;
  // A plan that cannot be used is so on every rank, and has no tasks: no rank counts this pass.
  if (args.plan != nullptr && !args.plan->ok()) return ptx::wait_for_last_launch();
  if (global_thread() == 0) begin_call(ctx.calls);
  copy_vectors(ctx.at<bf16>(v.rank, ctx.symmetric.tokens), args.tokens, v.tokens * v.hidden * 2);
  if (args.probs != nullptr) {
    copy_elements(ctx.at<float>(v.rank, ctx.symmetric.probs), args.probs, v.tokens * v.topk);
  }
  zero_pad_rows(ctx);
  ptx::wait_for_last_launch();
  note_bases(ctx, args);

  // The last CTA to be done publishes for all of them.
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence_system();
    last = atomicAdd(args.ctas_done, 1u) + 1 == gridDim.x;
  }
  __syncthreads();
  if (!last || threadIdx.x >= v.num_ranks) return;
  if (threadIdx.x == 0) *args.ctas_done = 0;
  // A tile per rank that is told.
  if (!may_signal(ctx.faults, {Stage::kEnter, static_cast<int>(threadIdx.x)})) return;
  ptx::fence_system();
  ptx::add_release_system(
      ctx.at<std::uint32_t>(static_cast<int>(threadIdx.x), ctx.symmetric.published) + v.rank, 1);
}

}  // namespace

cudaError_t prepare_enter() { return load_kernel(enter_kernel); }

cudaError_t launch_enter(const DeviceContext& ctx, const EnterArgs& args, int ctas,
                         cudaStream_t stream) {
  cudaLaunchAttribute beside{};
  beside.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  beside.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(ctas));
  config.blockDim = dim3(kEnterThreads);
  config.stream = stream;
  config.attrs = &beside;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, enter_kernel, ctx, args);
}

}  // namespace uniep::cuda
