#pragma once

#include "cuda/device/tile_shape.h"
#include "cuda/device/waits.cuh"
#include "cuda/ptx/tma.cuh"

namespace uniep::cuda {

// Dispatch: every warp pulls tokens by bulk copy into its slots in shared memory, several under way
// at a time, and stores each to all of its local rows.

inline constexpr int kDispatchWarps = 8;
inline constexpr int kWarpSlotBytes = 28672;
inline constexpr int kPullBytes = kWarpSlotBytes / 2;  // most of a token at a time: H = 7168
inline constexpr int kMaxPullSlots = 8;

struct DispatchShared {
  alignas(128) std::uint8_t slots[kDispatchWarps][kWarpSlotBytes];
  std::uint64_t full[kDispatchWarps][kMaxPullSlots];
};

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
        pieces_(ceil_div(token_bytes_, kPullBytes)),
        slot_bytes_(round_up(min_of(token_bytes_, kPullBytes), 128)),
        num_slots_(min_of(kWarpSlotBytes / slot_bytes_, kMaxPullSlots)) {
    if (lane_ == 0) {
      for (int i = 0; i < num_slots_; ++i) ptx::mbarrier_init(&full_[i], 1);
      ptx::mbarrier_init_fence();
    }
    __syncwarp();
  }

  /// Runs the CTA's tasks. Loads go ahead of stores by all slots but one, across tasks.
  __device__ __forceinline__ void run(const LaunchQueues& queues) {
    Cursor loads(ctx_.view, queues, warp_, pieces_);
    Cursor stores = loads;
    for (int ahead = 1; stores.valid(); ++ahead) {
      if (loads.valid()) {
        if (!start(loads)) return abandon();
        loads.advance();
      }
      if (ahead < num_slots_) continue;
      finish(stores);
      stores.advance();
    }
  }

  /// Signals what is still unsignalled, and ends the life of the barriers.
  __device__ __forceinline__ void end() {
    if (lane_ == 0) ptx::bulk_wait<0>();
    signal();
    if (lane_ == 0) {
      for (int i = 0; i < num_slots_; ++i) ptx::mbarrier_invalidate(&full_[i]);
    }
  }

 private:
  /// A ring over the slots, whose number depends on the token's size.
  struct Position {
    int slot = 0;
    int parity = 0;
    __device__ __forceinline__ void advance(int size) {
      if (++slot == size) {
        slot = 0;
        parity ^= 1;
      }
    }
  };

  /// Walks the pieces of the pulls that this warp takes: every kDispatchWarps-th of the CTA's
  /// tasks.
  class Cursor {
   public:
    __device__ __forceinline__ Cursor(const PassView& view, const LaunchQueues& queues, int warp,
                                      int pieces)
        : view_(view), queues_(queues), warp_(warp), pieces_(pieces), index_(blockIdx.x) {
      find_task();
    }
    __device__ __forceinline__ bool valid() const { return index_ < queues_.comm.size(); }
    __device__ __forceinline__ const Pull& pull() const { return pull_; }
    __device__ __forceinline__ int piece() const { return piece_; }
    __device__ __forceinline__ TaskName task_name() const { return {Stage::kDispatch, tile_}; }
    __device__ __forceinline__ bool at_last_piece() const { return piece_ == pieces_ - 1; }

    __device__ __forceinline__ void advance() {
      if (++piece_ < pieces_) return;
      piece_ = 0;
      at_ += kDispatchWarps;
      if (at_ < end_) {
        pull_ = view_.pulls[at_];
      } else {
        index_ += queues_.dispatchers;
        find_task();
      }
    }

   private:
    /// The first pull of this warp in this task or a later one.
    __device__ __forceinline__ void find_task() {
      for (; valid(); index_ += queues_.dispatchers) {
        const Task found = queue_task(view_, queues_.comm, index_);
        tile_ = static_cast<int>(found.tile);
        at_ = found.m + warp_;
        end_ = found.m + found.n;
        if (at_ < end_) {
          pull_ = view_.pulls[at_];
          return;
        }
      }
    }

    const PassView& view_;
    const LaunchQueues& queues_;
    int warp_;
    int pieces_;
    std::int64_t index_;  // of the task
    int tile_ = 0;        // its Task::tile
    std::int64_t at_ = 0;
    std::int64_t end_ = 0;
    Pull pull_;
    int piece_ = 0;
  };

  __device__ __forceinline__ int piece_bytes(int piece) const {
    return min_of(kPullBytes, token_bytes_ - piece * kPullBytes);
  }

  /// Asks for a piece, into the slot whose stores were issued longest ago. False: a wait expired.
  __device__ __forceinline__ bool start(const Cursor& at) {
    const Pull& pull = at.pull();
    const int bytes = piece_bytes(at.piece());
    int ready = 1;
    if (lane_ == 0) {
      if ((seen_ >> pull.source & 1) == 0) {
        random_delay(ctx_.faults, at.task_name());
        ready =
            wait_for(ctx_, at.task_name(), {CounterKind::kPublished, pull.source, 1, pull.source});
        seen_ |= 1u << pull.source;
        ptx::fence_proxy_async();
      }
      if (ready != 0) {
        ptx::bulk_wait_read<0>();  // the slot's stores are among them
        const auto* token = reinterpret_cast<const std::byte*>(
            ctx_.at<bf16>(pull.source, ctx_.symmetric.tokens) + pull.token * ctx_.view.hidden);
        ptx::mbarrier_arrive_expect(&full_[load_.slot], bytes);
        ptx::bulk_load(slots_ + load_.slot * slot_bytes_, token + at.piece() * kPullBytes, bytes,
                       &full_[load_.slot]);
      }
    }
    if (__shfl_sync(0xffffffffu, ready, 0) == 0) return false;
    load_.advance(num_slots_);
    return true;
  }

  /// Stores a piece that was asked for to all rows of its pull.
  __device__ __forceinline__ void finish(const Cursor& at) {
    const Pull& pull = at.pull();
    if (at.piece() == 0) fetch_probs(pull);
    if (lane_ == 0) {
      ptx::mbarrier_wait(&full_[store_.slot], store_.parity);
      for (int c = 0; c < pull.num_rows; ++c) {
        const std::int64_t row = ctx_.view.pull_rows[pull.first_row + c];
        auto* to = reinterpret_cast<std::byte*>(ctx_.dispatched + row * ctx_.view.hidden);
        ptx::bulk_store(to + at.piece() * kPullBytes, slots_ + store_.slot * slot_bytes_,
                        piece_bytes(at.piece()));
      }
      ptx::bulk_commit();
      ptx::bulk_wait<1>();  // the pieces before this one have landed
    }
    store_.advance(num_slots_);
    signal();
    if (!at.at_last_piece()) return;
    unsignalled_ = pull;
    unsignalled_task_ = at.task_name();
  }

  /// Waits for the pieces that are under way: the memory is about to be used otherwise.
  __device__ __forceinline__ void abandon() {
    for (; store_.slot != load_.slot || store_.parity != load_.parity; store_.advance(num_slots_)) {
      if (lane_ == 0) ptx::mbarrier_wait(&full_[store_.slot], store_.parity);
    }
  }

  /// Each row's probability, by the lane of its number.
  __device__ __forceinline__ void fetch_probs(const Pull& pull) {
    if (ctx_.view.pass != Pass::kForward || lane_ >= pull.num_rows) return;
    const std::int64_t row = ctx_.view.pull_rows[pull.first_row + lane_];
    const float* probs = ctx_.at<float>(pull.source, ctx_.symmetric.probs) +
                         std::int64_t{pull.token} * ctx_.view.topk;
    ctx_.row_probs[row] = probs[ctx_.view.row_origin[row].slot];
  }

  /// The last pull but one has landed: its rows are ready.
  __device__ __forceinline__ void signal() {
    if (unsignalled_.num_rows == 0) return;
    if (lane_ == 0) ptx::fence_proxy_async();
    __syncwarp();
    if (lane_ < unsignalled_.num_rows && may_signal(ctx_.faults, unsignalled_task_)) {
      const std::int64_t row = ctx_.view.pull_rows[unsignalled_.first_row + lane_];
      // Releases what all lanes have written before __syncwarp.
      ptx::add_release_gpu(ctx_.counters.rows_ready + row / ctx_.view.rows_per_counter(), 1);
    }
    unsignalled_.num_rows = 0;
  }

  const DeviceContext& ctx_;
  const int warp_;
  const int lane_;
  std::uint8_t* slots_;
  std::uint64_t* full_;
  const int token_bytes_;
  const int pieces_;
  const int slot_bytes_;
  const int num_slots_;
  Position load_;
  Position store_;
  unsigned seen_ = 0;   // sources known to have published
  Pull unsignalled_{};  // whose stores may still be under way
  TaskName unsignalled_task_{};
};

/// What a CTA that begins with communication does first. By all threads of the CTA.
__device__ __forceinline__ void dispatch_tasks(const DeviceContext& ctx, const LaunchQueues& queues,
                                               DispatchShared& shared) {
  if (threadIdx.x < 32 * kDispatchWarps) {
    DispatchWarp warp(ctx, shared);
    warp.run(queues);
    warp.end();
  }
  __syncthreads();
}

}  // namespace uniep::cuda
