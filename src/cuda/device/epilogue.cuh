#pragma once

#include "cuda/device/gemm.cuh"

// The two ways in which a warp brings its part of a tile out of the SM, both asynchronous: boxes
// through a tensor map, and rows pushed to the ranks that they came from. Signals are sent when the
// bytes have landed, which is noticed at the next tile: the main loop in between hides the latency.

namespace uniep::cuda {

/// This warp's place in the tile.
struct WarpPlace {
  int warp;  // 0 to kConsumerWarps - 1: rows [16 warp, 16 warp + 16) of the tile
  int lane;
  __device__ __forceinline__ WarpPlace()
      : warp(static_cast<int>(threadIdx.x) / 32 - 4), lane(static_cast<int>(threadIdx.x) % 32) {}
  __device__ __forceinline__ int first_row() const { return warp * kWarpRows; }
};

/// Output boxes of 16 rows by 64 columns, two buffers in turn.
class BoxWriter {
 public:
  __device__ __forceinline__ explicit BoxWriter(GemmShared& shared) : shared_(shared) {}

  __device__ __forceinline__ void write(const std::uint32_t (&pairs)[kPairs],
                                        const CUtensorMap& map, int c0, int c1, int c2) {
    std::uint8_t* box = shared_.out.boxes[place_.warp][next_];
    if (place_.lane == 0) ptx::bulk_wait_read<1>();
    __syncwarp();
    store_box(box, pairs);
    ptx::fence_proxy_async_shared();
    __syncwarp();
    if (place_.lane == 0) {
      ptx::tma_store(map, box, c0, c1, c2);
      ptx::bulk_commit();
    }
    next_ ^= 1;
  }

 private:
  GemmShared& shared_;
  WarpPlace place_;
  int next_ = 0;
};

/// Tells that a tile is done once all consumer warps have stored their parts.
class TileSignal {
 public:
  __device__ __forceinline__ TileSignal(const DeviceContext& ctx, GemmShared& shared)
      : ctx_(ctx), shared_(shared) {}

  /// Notes that this warp's stores of a tile are under way; the last warp to see its own landed
  /// adds 1 to `counters`.
  __device__ __forceinline__ void arm(const TaskName& task, std::uint32_t* counter0,
                                      std::uint32_t* counter1) {
    task_ = task;
    counters_[0] = counter0;
    counters_[1] = counter1;
    armed_ = true;
  }

  /// To be called before the next tile's stores.
  __device__ __forceinline__ void flush() {
    if (!armed_) return;
    armed_ = false;
    if (threadIdx.x % 32 != 0) return;
    ptx::bulk_wait<0>();
    ptx::fence_proxy_async();
    __threadfence();
    int& warps_done = shared_.warps_done[tile_++ % kTilesUnderWay];
    if (atomicAdd(&warps_done, 1) + 1 != kConsumerWarps) return;
    warps_done = 0;
    if (!may_signal(ctx_.faults, task_)) return;
    __threadfence();
    for (std::uint32_t* counter : counters_) {
      if (counter != nullptr) ptx::add_release_gpu(counter, 1);
    }
  }

 private:
  const DeviceContext& ctx_;
  GemmShared& shared_;
  TaskName task_{};
  std::uint32_t* counters_[2] = {nullptr, nullptr};
  bool armed_ = false;
  int tile_ = 0;  // number of tiles flushed; lane 0's
};

/// Combine: pushes rows of bf16 to their slots on the ranks that they came from. Lane l < 16 sends
/// row l of the warp, in two pieces of kPushCols columns.
class RowPusher {
 public:
  __device__ __forceinline__ RowPusher(const DeviceContext& ctx, GemmShared& shared)
      : ctx_(ctx), shared_(shared) {}

  /// Looks up where this lane's row of the tile goes.
  __device__ __forceinline__ void prepare(const TileWork& work) {
    const int row = place_.first_row() + place_.lane;
    origin_ = RowOrigin{};
    if (place_.lane < kWarpRows && row < work.rows) {
      origin_ = ctx_.view.row_origin[work.first_row + row];
    }
  }

  __device__ __forceinline__ const RowOrigin& origin() const { return origin_; }
  __device__ __forceinline__ std::int64_t slot() const {
    return std::int64_t{origin_.token} * ctx_.view.topk + origin_.slot;
  }

  __device__ __forceinline__ void push(const float (&acc)[128], const TileWork& work) {
    std::uint8_t* rows = shared_.out.pushes[place_.warp];
    const int lane_row = place_.lane % 16;
    const std::uint32_t base = ptx::shared_address(rows) +
                               static_cast<std::uint32_t>(lane_row * kPushRowBytes) +
                               static_cast<std::uint32_t>(place_.lane / 16 * 16);
#pragma unroll
    for (int half = 0; half < kTileN / kPushCols; ++half) {
      if (place_.lane < kWarpRows) ptx::bulk_wait_read<0>();
      __syncwarp();
#pragma unroll
      for (int group = 0; group < kPushCols / 16; ++group) {
        std::uint32_t pairs[4];
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          const int i = (half * kPushCols / 2) + group * 8 + 2 * q;
          pairs[q] = pack_pair(acc[i], acc[i + 1]);
        }
        store_matrices(base + static_cast<std::uint32_t>(group * 32), pairs);
      }
      ptx::fence_proxy_async_shared();
      __syncwarp();
      const std::int64_t col = work.n + half * kPushCols;
      const std::int64_t cols = min_of<std::int64_t>(kPushCols, ctx_.view.hidden - col);
      if (origin_.source >= 0 && cols > 0) {
        bf16* to =
            ctx_.at<bf16>(origin_.source, ctx_.symmetric.combine) + slot() * ctx_.view.hidden + col;
        ptx::bulk_store(to, rows + lane_row * kPushRowBytes, static_cast<int>(cols) * 2);
      }
      ptx::bulk_commit();
    }
    const std::int64_t cols = min_of<std::int64_t>(kTileN, ctx_.view.hidden - work.n);
    pending_ = origin_;
    pending_cols_ = static_cast<std::uint32_t>(cols);
    pending_task_ = work.task;
  }

  /// Signals the rows of the last tile, when they have landed; to be called before the next push.
  __device__ __forceinline__ void flush() {
    if (pending_cols_ == 0) return;
    const bool sends = pending_.source >= 0;
    const int token_block = sends ? pending_.token / ctx_.view.schedule.token_block : -1;
    if (sends) {
      ptx::bulk_wait<0>();
      ptx::fence_proxy_async();
      ptx::fence_system();
    }
    __syncwarp();
    // Rows of one source's token block share a counter: one lane adds for all of them.
    const unsigned long long key = static_cast<unsigned long long>(pending_.source + 1) << 32 |
                                   static_cast<unsigned>(token_block);
    const unsigned same = __match_any_sync(0xffffffffu, key);
    const bool first = sends && (same & ((1u << place_.lane) - 1)) == 0;
    if (first && may_signal(ctx_.faults, pending_task_)) {
      std::uint32_t* counter = ctx_.at<std::uint32_t>(pending_.source, ctx_.symmetric.arrived) +
                               static_cast<std::int64_t>(token_block) * ctx_.view.num_ranks +
                               ctx_.view.rank;
      ptx::fence_system();
      ptx::add_relaxed_system(counter, static_cast<std::uint32_t>(__popc(same)) * pending_cols_);
    }
    pending_cols_ = 0;
  }

 private:
  const DeviceContext& ctx_;
  GemmShared& shared_;
  WarpPlace place_;
  RowOrigin origin_;
  RowOrigin pending_;
  std::uint32_t pending_cols_ = 0;
  TaskName pending_task_{};
};

}  // namespace uniep::cuda
