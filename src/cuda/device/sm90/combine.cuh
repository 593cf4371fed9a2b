#pragma once

#include "base/row_factors.h"
#include "cuda/device/sm90/biases.cuh"
#include "cuda/device/sm90/gemm.cuh"
#include "cuda/device/warp.cuh"

// Combine: rows of a tile go straight to their slots on the ranks that they came from, and what has
// arrived is counted there. Lane l of a sender knows where rows l and l + 32 of its consumer's 64
// go.

namespace uniep::cuda {

/// What the stages that push rows share: their epilogue writes rows of kPushCols columns.
template <class Shape>
struct RowPush : EmptyEpilogueSlots<Shape, (OutputRing<Shape>::kParts > 1)> {
  using Ring = OutputRing<Shape>;

  static __device__ __forceinline__ Nothing prepare(const Consumer<Shape>&, const TileWork&) {
    return {};
  }

  static __device__ __forceinline__ void finish(Consumer<Shape>& consumer,
                                                const float (&acc)[Shape::kAccumulators],
                                                const TileWork&, const Nothing&) {
    write_rows(consumer, acc, [](int, MatrixPairs&) {});
  }

 protected:
  /// change(group, pairs) says what becomes of the pairs of each 16 columns.
  template <class Change>
  static __device__ __forceinline__ void write_rows(Consumer<Shape>& consumer,
                                                    const float (&acc)[Shape::kAccumulators],
                                                    Change&& change) {
#pragma unroll
    for (int part = 0; part < Ring::kParts; ++part) {
      Ring::for_each_buffer(part, [&](int buffer) { consumer.acquire(buffer); });
      std::uint8_t* rows = Ring::rows(consumer.shared, consumer.index, consumer.ring.slot, part);
      const int lane = ptx::lane_id();
      const std::uint32_t lane_row =
          ptx::shared_address(rows) +
          static_cast<std::uint32_t>((16 * consumer.warp() + lane % 16) * kPushRowBytes +
                                     lane / 16 * 16);
#pragma unroll
      for (int group = 0; group < kPushCols / 16; ++group) {
        MatrixPairs pairs;
#pragma unroll
        for (int q = 0; q < kMatrixPairs; ++q) {
          const int i = part * (kPushCols / 2) + group * 8 + 2 * q;
          pairs[q] = pack_pair(acc[i], acc[i + 1]);
        }
        change(part * (kPushCols / 16) + group, pairs);
        store_matrices(lane_row + static_cast<std::uint32_t>(group * 32), pairs);
      }
      Ring::for_each_buffer(part, [&](int buffer) { consumer.commit(buffer); });
    }
    if (Ring::kParts > 1) consumer.ring.advance();
  }
};

template <class Shape>
__device__ __forceinline__ PushRows rows_to_push(const Sender<Shape>& sender,
                                                 const TileWork& work) {
  PushRows rows;
#pragma unroll
  for (int i = 0; i < PushRows::kPerLane; ++i) {
    const int row = kConsumerRows * sender.index + 32 * i + sender.lane;
    if (row < work.rows) rows.origin[i] = sender.ctx.view.row_origin[work.plan_row + row];
  }
  return rows;
}

/// Signals `amount` elements of each row to the row's rank, when what the warp has stored is
/// visible there. Rows of one source's token block share a counter: one lane adds for all of them.
template <Stage stage, class Shape>
__device__ __forceinline__ void signal_arrivals(const Sender<Shape>& sender, const PushRows& rows,
                                                std::uint32_t amount) {
  const DeviceContext& ctx = sender.ctx;
  __syncwarp();
  ptx::fence_system();  // one for all of the warp's stores, then cheap adds
#pragma unroll
  for (int i = 0; i < PushRows::kPerLane; ++i) {
    const bool goes = rows.goes(i);
    const int block = goes ? token_block(ctx.view, rows.origin[i]) : -1;
    const unsigned long long key = static_cast<unsigned long long>(rows.origin[i].source + 1)
                                       << 32 |
                                   static_cast<unsigned>(block);
    const unsigned same = __match_any_sync(kWholeWarp, key);
    if (!goes || (same & ((1u << sender.lane) - 1)) != 0) continue;
    for_each_counter<kSignalsOf<stage> & kSymmetricCounters>([&](CounterKind kind) {
      const Signal s = arrival_signal(ctx.view, kind, rows.origin[i].source, block,
                                      static_cast<std::uint32_t>(__popc(same)) * amount);
      ptx::add_relaxed_system(ctx.counter(s), s.amount);
    });
  }
}

/// Stores one part of the rows, 128 columns, of which the first `cols` exist. Half a warp takes a
/// row, so that each store is of whole lines. `to[i]` is where the lane's row number i goes, or 0.
/// Several rows are read before the first is stored: one after another, each would wait for the way
/// to shared memory and back.
__device__ __forceinline__ void store_part(const std::uint8_t* from,
                                           const std::uint64_t (&to)[PushRows::kPerLane], int cols,
                                           int lane) {
  constexpr int kRowsAtOnce = 2;
  constexpr int kAhead = 4;
  const int vector = lane % 16;
  const bool exists = vector * kVectorElements < cols;
#pragma unroll
  for (int i = 0; i < PushRows::kPerLane; ++i) {
#pragma unroll 2
    for (int first = 0; first < 32; first += kAhead * kRowsAtOnce) {
      Vector values[kAhead];
      std::uint64_t address[kAhead];
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        const int row = first + j * kRowsAtOnce + lane / 16;
        values[j] = reinterpret_cast<const Vector*>(from + (32 * i + row) * kPushRowBytes)[vector];
        address[j] = __shfl_sync(kWholeWarp, to[i], row);
      }
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        if (exists && address[j] != 0) reinterpret_cast<Vector*>(address[j])[vector] = values[j];
      }
    }
  }
}

/// Pushes the consumer's rows of the tile, 128 columns at a time, and signals them. Ordinary
/// stores: where the link is busy, bulk copies would hold up the copy engine, and with it the loads
/// of the next tile.
template <Stage stage, class Shape>
__device__ __forceinline__ void push_rows(Sender<Shape>& sender, const PushRows& rows,
                                          const TileWork& work) {
  using Ring = OutputRing<Shape>;
  const DeviceContext& ctx = sender.ctx;
  const std::int64_t hidden = ctx.view.hidden;
#pragma unroll
  for (int part = 0; part < Ring::kParts; ++part) {
    std::uint64_t to[PushRows::kPerLane];
#pragma unroll
    for (int i = 0; i < PushRows::kPerLane; ++i) {
      const bf16* row = rows.goes(i)
                            ? ctx.peer(rows.origin[i].source).template get<Tensor::kCombine>() +
                                  rows.slot(i, ctx.view.slots) * hidden + work.n + part * kPushCols
                            : nullptr;
      to[i] = reinterpret_cast<std::uint64_t>(row);
    }
    Ring::for_each_buffer(part, [&](int buffer) { sender.wait_written(buffer); });
    store_part(Ring::rows(sender.shared, sender.index, sender.ring.slot, part), to,
               work.width - part * kPushCols, sender.lane);
    Ring::for_each_buffer(part, [&](int buffer) { sender.give_back(buffer); });
    if (Ring::part_in_slot(part)) sender.give_back_slot();
  }
  if (!may_signal(ctx.fault_injection, work.name())) return;
  signal_arrivals<stage>(sender, rows, static_cast<std::uint32_t>(work.width));
}

/// The sum over column groups, ascending, of each row's dprob; `kGeneral`: divided by the row's
/// probability where that has entered behind fc2.
template <bool kGeneral, class Shape>
__device__ __forceinline__ void push_dprobs(const Sender<Shape>& sender, const PushRows& rows,
                                            const TileWork& work) {
  constexpr int kAhead = 8;  // loads in flight
  const DeviceContext& ctx = sender.ctx;
  const auto groups = static_cast<int>(sums_of_row<kGeneral>(ctx.view));
#pragma unroll
  for (int i = 0; i < PushRows::kPerLane; ++i) {
    if (!rows.goes(i)) continue;
    const std::int64_t row = work.first_row + kConsumerRows * sender.index + 32 * i + sender.lane;
    const float* from = ctx.get<Tensor::kDprobGroups>() + row * groups;
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
    if (kGeneral && ctx.view.probs == Probs::kAfter) {
      const int row_of_tile = kConsumerRows * sender.index + 32 * i + sender.lane;
      sum /= factor_of_dy(ctx.get<Tensor::kRowProbs>()[work.saved_row + row_of_tile]);
    }
    float* slots = ctx.peer(rows.origin[i].source).template get<Tensor::kDprobSlots>();
    slots[rows.slot(i, ctx.view.slots)] = sum;
  }
}

}  // namespace uniep::cuda
