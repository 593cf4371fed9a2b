#pragma once

#include "cuda/device/waits.cuh"
#include "cuda/ptx/tma.cuh"

namespace uniep::cuda {

// Dispatch: every warp pulls tokens by bulk copy into shared memory, two under way at a time, and
// stores each to all of its local rows.

inline constexpr int kDispatchWarps = 8;
inline constexpr int kPullBytes = 14336;  // of a token at a time: a whole one up to H = 7168
inline constexpr int kPullSlots = 2;

struct DispatchShared {
  alignas(128) std::uint8_t slots[kDispatchWarps][kPullSlots][kPullBytes];
  std::uint64_t full[kDispatchWarps][kPullSlots];
};
static_assert(sizeof(DispatchShared) <= 232448, "more shared memory than a CTA can have on sm_90");

/// One warp's work. A *piece* is up to kPullBytes of one pull.
class DispatchWarp {
 public:
  __device__ __forceinline__ DispatchWarp(const DeviceContext& ctx, DispatchShared& shared)
      : ctx_(ctx),
        warp_(static_cast<int>(threadIdx.x) / 32),
        lane_(static_cast<int>(threadIdx.x) % 32),
        slots_(shared.slots[warp_]),
        full_(shared.full[warp_]),
        token_bytes_(static_cast<int>(ctx.view.hidden) * 2),
        pieces_(ceil_div(token_bytes_, kPullBytes)) {
    if (lane_ == 0) {
      for (int i = 0; i < kPullSlots; ++i) ptx::mbarrier_init(&full_[i], 1);
      ptx::mbarrier_init_fence();
    }
    __syncwarp();
  }

  /// Pulls that this warp takes of the task: every kDispatchWarps-th. False: a wait expired.
  __device__ __forceinline__ bool run(const Task& task) {
    const std::int64_t first = task.m + warp_;
    const std::int64_t end = task.m + task.n;
    const int count =
        first < end ? static_cast<int>((end - first + kDispatchWarps - 1) / kDispatchWarps) : 0;
    for (int piece = 0; piece < count * pieces_ + 1; ++piece) {
      if (piece < count * pieces_ && !start(task, pull_at(first, piece), piece % pieces_)) {
        return false;
      }
      if (piece > 0) finish(task, pull_at(first, piece - 1), (piece - 1) % pieces_);
    }
    return true;
  }

  /// Signals what is still unsignalled.
  __device__ __forceinline__ void flush() {
    if (lane_ == 0) ptx::bulk_wait<0>();
    signal();
  }

 private:
  __device__ __forceinline__ Pull pull_at(std::int64_t first, int piece) const {
    return ctx_.view.pulls[first + std::int64_t{piece / pieces_} * kDispatchWarps];
  }
  __device__ __forceinline__ int piece_bytes(int piece) const {
    return min_of(kPullBytes, token_bytes_ - piece * kPullBytes);
  }

  /// Asks for a piece, into the slot whose stores were issued longest ago.
  __device__ __forceinline__ bool start(const Task& task, const Pull& pull, int piece) {
    int ready = 1;
    if (lane_ == 0) {
      if ((seen_ >> pull.source & 1) == 0) {
        ready = wait_for(ctx_, task, {CounterKind::kPublished, pull.source, 1, pull.source});
        seen_ |= 1u << pull.source;
        ptx::fence_proxy_async();
      }
      if (ready != 0) {
        ptx::bulk_wait_read<0>();  // the slot's stores are the last ones issued
        const auto* token = reinterpret_cast<const std::byte*>(
            ctx_.at<bf16>(pull.source, ctx_.symmetric.tokens) + pull.token * ctx_.view.hidden);
        ptx::mbarrier_arrive_expect(&full_[load_.slot], piece_bytes(piece));
        ptx::bulk_load(slots_[load_.slot], token + piece * kPullBytes, piece_bytes(piece),
                       &full_[load_.slot]);
      }
    }
    load_.advance();
    return __shfl_sync(0xffffffffu, ready, 0) != 0;
  }

  /// Stores a piece that was asked for to all rows of its pull.
  __device__ __forceinline__ void finish(const Task& task, const Pull& pull, int piece) {
    if (piece == 0) fetch_probs(pull);
    if (lane_ == 0) {
      ptx::mbarrier_wait(&full_[store_.slot], store_.parity);
      for (int c = 0; c < pull.num_rows; ++c) {
        const std::int64_t row = ctx_.view.pull_rows[pull.first_row + c];
        auto* to = reinterpret_cast<std::byte*>(ctx_.dispatched + row * ctx_.view.hidden);
        ptx::bulk_store(to + piece * kPullBytes, slots_[store_.slot], piece_bytes(piece));
      }
      ptx::bulk_commit();
      ptx::bulk_wait<1>();  // the pieces before this one have landed
    }
    store_.advance();
    signal();
    if (piece != pieces_ - 1) return;
    unsignalled_ = pull;
    unsignalled_task_ = name_of(task);
  }

  /// Each row's probability, by the lane of its number.
  __device__ __forceinline__ void fetch_probs(const Pull& pull) {
    if (ctx_.view.pass != Pass::kForward || lane_ >= pull.num_rows) return;
    const std::int64_t row = ctx_.view.pull_rows[pull.first_row + lane_];
    const float* probs = ctx_.at<float>(pull.source, ctx_.symmetric.probs) +
                         std::int64_t{pull.token} * ctx_.view.topk;
    ctx_.row_probs[row] = probs[ctx_.view.row_origin[row].slot];
    __threadfence();
  }

  /// The last pull but one has landed: its rows are ready.
  __device__ __forceinline__ void signal() {
    __syncwarp();
    if (unsignalled_.num_rows == 0) return;
    if (lane_ == 0) {
      ptx::fence_proxy_async();
      __threadfence();
    }
    __syncwarp();
    if (lane_ < unsignalled_.num_rows && may_signal(ctx_.faults, unsignalled_task_)) {
      const std::int64_t row = ctx_.view.pull_rows[unsignalled_.first_row + lane_];
      __threadfence();
      ptx::add_release_gpu(ctx_.counters.rows_ready + row / ctx_.view.rows_per_counter(), 1);
    }
    unsignalled_.num_rows = 0;
  }

  const DeviceContext& ctx_;
  const int warp_;
  const int lane_;
  std::uint8_t (*slots_)[kPullBytes];
  std::uint64_t* full_;
  const int token_bytes_;
  const int pieces_;
  ptx::RingPosition<kPullSlots> load_;
  ptx::RingPosition<kPullSlots> store_;
  unsigned seen_ = 0;   // sources known to have published
  Pull unsignalled_{};  // whose stores may still be under way
  TaskName unsignalled_task_{};
};

}  // namespace uniep::cuda
