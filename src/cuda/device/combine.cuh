#pragma once

#include "cuda/device/gemm.cuh"

// Combine: rows of a tile go straight to their slots on the ranks that they came from, and what has
// arrived is counted there. Lane l of a sender pushes rows l and l + 32 of its consumer's 64.

namespace uniep::cuda {

/// What the stages that push rows share: their epilogue writes rows of kPushCols columns, the first
/// part to the consumer's own boxes, the second to the borrowed slot.
template <class Shape>
struct RowPush : EmptyEpilogueSlots<Shape, (Shape::kN > kPushCols)> {
  static constexpr int kParts = Shape::kN / kPushCols;

  /// Buffers that stand for a part: all of the consumer's own boxes, or the first of the slot's.
  template <class F>
  static __device__ __forceinline__ void for_each_buffer(int part, F&& f) {
    if (part > 0) return f(Shape::kOwnBoxes);
#pragma unroll
    for (int buffer = 0; buffer < Shape::kOwnBoxes; ++buffer) f(buffer);
  }

  static __device__ __forceinline__ Nothing prepare(const Consumer<Shape>&, const TileWork&) {
    return {};
  }

  static __device__ __forceinline__ void finish(Consumer<Shape>& consumer,
                                                const float (&acc)[Shape::kAccumulators],
                                                const TileWork&, const Nothing&) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      for_each_buffer(part, [&](int buffer) { consumer.acquire(buffer); });
      std::uint8_t* rows = output_rows(consumer.shared, consumer.index, consumer.ring.slot, part);
      const std::uint32_t lane_row =
          ptx::shared_address(rows) +
          static_cast<std::uint32_t>((16 * consumer.warp + consumer.lane % 16) * kPushRowBytes +
                                     consumer.lane / 16 * 16);
#pragma unroll
      for (int group = 0; group < kPushCols / 16; ++group) {
        std::uint32_t pairs[4];
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          const int i = part * (kPushCols / 2) + group * 8 + 2 * q;
          pairs[q] = pack_pair(acc[i], acc[i + 1]);
        }
        store_matrices(lane_row + static_cast<std::uint32_t>(group * 32), pairs);
      }
      for_each_buffer(part, [&](int buffer) { consumer.commit(buffer); });
    }
    if (kParts > 1) consumer.ring.advance();
  }
};

template <class Shape>
__device__ __forceinline__ PushRows rows_to_push(const Sender<Shape>& sender,
                                                 const TileWork& work) {
  PushRows rows;
#pragma unroll
  for (int i = 0; i < PushRows::kPerLane; ++i) {
    const int row = kConsumerRows * sender.index + 32 * i + sender.lane;
    if (row < work.rows) rows.origin[i] = sender.ctx.view.row_origin[work.first_row + row];
  }
  return rows;
}

/// Signals the rows pushed last, when all but the latest `kUnderWay` of the sender's groups of
/// stores have landed: adds the columns of each row to the arrival counter of its token. Rows of
/// one source's token block share a counter: one lane adds for all of them.
template <int kUnderWay, class Shape>
__device__ __forceinline__ void signal_arrivals(Sender<Shape>& sender) {
  if (sender.pushed_cols == 0) return;
  // Every lane waits for its own rows; then one fence for all of the warp's, and cheap adds.
  ptx::bulk_wait<kUnderWay>();
  ptx::fence_proxy_async();
  __syncwarp();
  ptx::fence_system();
  const DeviceContext& ctx = sender.ctx;
  const PushRows& rows = sender.unsignalled;
#pragma unroll
  for (int i = 0; i < PushRows::kPerLane; ++i) {
    const bool goes = rows.goes(i);
    const int block = goes ? rows.origin[i].token / ctx.view.schedule.token_block : -1;
    const unsigned long long key = static_cast<unsigned long long>(rows.origin[i].source + 1)
                                       << 32 |
                                   static_cast<unsigned>(block);
    const unsigned same = __match_any_sync(0xffffffffu, key);
    if (!goes || (same & ((1u << sender.lane) - 1)) != 0) continue;
    std::uint32_t* counter = ctx.at<std::uint32_t>(rows.origin[i].source, ctx.symmetric.arrived) +
                             static_cast<std::int64_t>(block) * ctx.view.num_ranks + ctx.view.rank;
    ptx::add_relaxed_system(counter, static_cast<std::uint32_t>(__popc(same)) * sender.pushed_cols);
  }
  sender.pushed_cols = 0;
}

/// Pushes the consumer's rows of the tile, 128 columns at a time. They are signalled when the rows
/// of the next tile are on their way, so that the link never runs dry, or as soon as there is no
/// next tile: the products of one that was handed out wait for nothing, so neither does its sender.
template <class Shape>
__device__ __forceinline__ void push_rows(Sender<Shape>& sender, const PushRows& rows,
                                          const TileWork& work) {
  using Push = RowPush<Shape>;
  const DeviceContext& ctx = sender.ctx;
  const std::int64_t hidden = ctx.view.hidden;
  const auto cols = static_cast<int>(min_of<std::int64_t>(Shape::kN, hidden - work.n));
#pragma unroll
  for (int part = 0; part < Push::kParts; ++part) {
    Push::for_each_buffer(part, [&](int buffer) { sender.wait_written(buffer); });
    const std::uint8_t* from = output_rows(sender.shared, sender.index, sender.ring.slot, part);
    const int part_cols = min_of(kPushCols, cols - part * kPushCols);
#pragma unroll
    for (int i = 0; i < PushRows::kPerLane; ++i) {
      if (!rows.goes(i) || part_cols <= 0) continue;
      bf16* to = ctx.at<bf16>(rows.origin[i].source, ctx.symmetric.combine) +
                 rows.slot(i, ctx.view.topk) * hidden + work.n + part * kPushCols;
      ptx::bulk_store(to, from + (32 * i + sender.lane) * kPushRowBytes, part_cols * 2);
    }
    ptx::bulk_commit();
  }
  ptx::bulk_wait_read<0>();
  __syncwarp();
#pragma unroll
  for (int part = 0; part < Push::kParts; ++part) {
    if (sender.lane != 0) continue;
    Push::for_each_buffer(part, [&](int buffer) { sender.give_back(buffer); });
  }
  if (Push::kEpilogueSlots > 0) sender.give_back_slot();
  signal_arrivals<Push::kParts>(sender);
  if (!may_signal(ctx.faults, work.name())) return;
  sender.unsignalled = rows;
  sender.pushed_cols = static_cast<std::uint32_t>(cols);
}

/// The sum over column groups, ascending, of each row's dprob.
template <class Shape>
__device__ __forceinline__ void push_dprobs(const Sender<Shape>& sender, const PushRows& rows,
                                            const TileWork& work) {
  constexpr int kAhead = 8;  // loads in flight
  const DeviceContext& ctx = sender.ctx;
  const auto groups = static_cast<int>(ceil_div(ctx.view.intermediate, kDprobGroup));
#pragma unroll
  for (int i = 0; i < PushRows::kPerLane; ++i) {
    if (!rows.goes(i)) continue;
    const std::int64_t row = work.first_row + kConsumerRows * sender.index + 32 * i + sender.lane;
    const float* from = ctx.dprob_groups + row * groups;
    float sum = 0;
    for (int g = 0; g < groups; g += kAhead) {
      float ahead[kAhead];
#pragma unroll
      for (int j = 0; j < kAhead; ++j) ahead[j] = g + j < groups ? __ldcg(from + g + j) : 0.0f;
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        if (g + j < groups) sum += ahead[j];
      }
    }
    ctx.at<float>(rows.origin[i].source, ctx.symmetric.dprobs)[rows.slot(i, ctx.view.topk)] = sum;
  }
}

}  // namespace uniep::cuda
