#pragma once

#include "cuda/device/gemm.cuh"

// Combine: rows of a tile go straight to their slots on the ranks that they came from, and what has
// arrived is counted there. Lane l of a sender pushes rows l and l + 32 of its consumer's 64.

namespace uniep::cuda {

/// What the stages that push rows share: their products leave the consumers as rows, the first in
/// the consumer's own buffer, the others in the borrowed slot.
template <class Shape>
struct RowPush {
  static constexpr bool kBorrows = Shape::kPushRows < kConsumerRows;
  static constexpr int kEpilogueSlots = kBorrows ? 1 : 0;

  /// All of the consumer's own boxes, and the first of the slot's.
  template <class F>
  static __device__ __forceinline__ void for_each_buffer(const DeviceContext&, F&& f) {
#pragma unroll
    for (int buffer = 0; buffer < Shape::kOwnBoxes + kEpilogueSlots; ++buffer) f(buffer);
  }

  static __device__ __forceinline__ void write(Consumer<Shape>& consumer,
                                               const float (&acc)[Shape::kAccumulators],
                                               const TileWork&) {
    for_each_buffer(consumer.ctx, [&](int buffer) { consumer.acquire(buffer); });
    const std::uint8_t* row = output_row(consumer.shared, consumer.index, consumer.ring.slot,
                                         16 * consumer.warp + consumer.lane % 16);
    const std::uint32_t address =
        ptx::shared_address(row) + static_cast<std::uint32_t>(consumer.lane / 16 * 16);
#pragma unroll
    for (int group = 0; group < Shape::kN / 16; ++group) {
      std::uint32_t pairs[4];
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        const int i = group * 8 + 2 * q;
        pairs[q] = pack_pair(acc[i], acc[i + 1]);
      }
      store_matrices(address + static_cast<std::uint32_t>(group * 32), pairs);
    }
    for_each_buffer(consumer.ctx, [&](int buffer) { consumer.commit(buffer); });
    consumer.ring.advance(kEpilogueSlots);
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
  const std::uint32_t cols = sender.pushed_cols;
  sender.pushed_cols = 0;
  if (!may_signal(ctx.faults, sender.pushed)) return;
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
    ptx::add_relaxed_system(counter, static_cast<std::uint32_t>(__popc(same)) * cols);
  }
}

/// Pushes the consumer's rows of the tile. They are signalled when the next tile is on its way, so
/// that the link never runs dry, or as soon as the sender has nothing to do.
template <class Shape>
__device__ __forceinline__ void push_rows(Sender<Shape>& sender, const PushRows& rows,
                                          const TileWork& work) {
  using Push = RowPush<Shape>;
  const DeviceContext& ctx = sender.ctx;
  const std::int64_t hidden = ctx.view.hidden;
  const auto cols = static_cast<int>(min_of<std::int64_t>(Shape::kN, hidden - work.n));
  if (!sender.is_written(0)) signal_arrivals<0>(sender);
  Push::for_each_buffer(ctx, [&](int buffer) { sender.wait_written(buffer); });
#pragma unroll
  for (int i = 0; i < PushRows::kPerLane; ++i) {
    if (!rows.goes(i)) continue;
    bf16* to = ctx.at<bf16>(rows.origin[i].source, ctx.symmetric.combine) +
               rows.slot(i, ctx.view.topk) * hidden + work.n;
    ptx::bulk_store(to,
                    output_row(sender.shared, sender.index, sender.ring.slot, 32 * i + sender.lane),
                    cols * 2);
  }
  ptx::bulk_commit();
  ptx::bulk_wait_read<0>();
  Push::for_each_buffer(ctx, [&](int buffer) { sender.give_back(buffer); });
  if (Push::kBorrows) sender.give_back_slot();
  signal_arrivals<1>(sender);
  sender.unsignalled = rows;
  sender.pushed_cols = static_cast<std::uint32_t>(cols);
  sender.pushed = work.name();
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
