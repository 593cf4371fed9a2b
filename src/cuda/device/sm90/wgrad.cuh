#pragma once

#include <type_traits>

#include "cuda/device/sm90/gemm.cuh"
#include "cuda/device/sm90/step_sums.cuh"

namespace uniep::cuda {

/// A weight gradient: left^T right, summed over an expert's rows in canonical order, 64 rows at a
/// time from the segment's first. Rows behind its last, up to the next multiple of 64, are zeros of
/// the operand that was dispatched; of the other they are what fc1 and dfc2 made of zeros, and so
/// zeros where weights are finite.
/// kWgrad is wgrad2 (dw2 = dy^T a) or wgrad1 (dw1 = dh^T x). It is overwritten in bf16, or added to
/// a tensor of `Main`, float or bf16: a kernel with both would not have registers enough.
/// Maps: a = left (M, rows), b = right (N, rows), boxes 64 x 64; out0 = dw, or what it is added to,
/// (N, M, El), boxes of one swizzle row of columns x 64; or of each matrix [in, out] (M, N), boxes
/// of one swizzle row of rows x 64, which sums are transposed for.
///
/// kGeneral: as of Fc1; senders then sum the bias gradient, too: over the rows of dh, and of dy
/// times what b2 was multiplied by.
///
/// What is added to comes through the pipeline too, behind the operands: two boxes of each consumer
/// a slot. The sums are added where it lies, and it leaves from there. When the tile begins, it is
/// fetched into L2, so that it is near when the sums are done.
template <class Shape, Stage kWgrad, class Main, bool kGeneral>
struct Wgrad {
  static constexpr Stage kStage = kWgrad;
  static constexpr ptx::Major kMajorA = ptx::Major::kMn;
  static constexpr ptx::Major kMajorB = ptx::Major::kMn;

  static __device__ __forceinline__ void load(const DeviceContext& ctx, const StageMaps& maps,
                                              OperandSlot<Shape>& slot, std::uint64_t* full,
                                              const TileWork& work, int first_token, int k_block) {
    const int row = work.plan_row + k_block * kTileK;
    // Rows may go on at the begin of a ring; those of x may lie in several pages. A step of 64 is
    // in one piece.
    const int row_of_a = call_row<Shape>(ctx.view, row);
    int row_of_b = row_of_a;
    if (kStage == Stage::kWgrad1 && is_saved<Tensor::kXRows>(ctx.view)) {
      row_of_b = static_cast<int>(saved_row(ctx.view, row));
    }
    constexpr Tensor kA = row_of(kStage).reads[0], kB = row_of(kStage).reads[1];
    const OperandRows a = operand_rows<kA>(maps, maps.a, row_of_a, row, first_token);
    load_squares<kTileM / 64>(slot.a, *a.map, full, work.m, a.row, 0);
    const OperandRows b = operand_rows<kB>(maps, maps.b, row_of_b, row, first_token);
    load_squares<Shape::kN / 64>(slot.b, *b.map, full, work.n, b.row, 0);
  }

  static __device__ __forceinline__ void prefetch_epilogue(const DeviceContext& ctx,
                                                           const StageMaps& maps,
                                                           const TileWork& work) {
    if (!is_added(ctx) || work.rows == 0) return;
    acquire_maps(maps.experts, work.expert);
#pragma unroll 1
    for (int i = 0; i < kAddedSlots; ++i) {
      for_each_box(ctx, work, i, [&](int, int row, int col) {
        at_box(ctx, maps, work, row, col, [&](const CUtensorMap& map, int, int c0, int c1, int c2) {
          ptx::tma_prefetch(map, c0, c1, c2);
        });
      });
    }
  }
  static __device__ __forceinline__ int epilogue_slots(const DeviceContext& ctx) {
    return is_added(ctx) ? kAddedSlots : Borrowed::kEpilogueSlots;
  }
  static __device__ __forceinline__ void load_epilogue(const DeviceContext& ctx,
                                                       const StageMaps& maps,
                                                       OperandSlot<Shape>& slot,
                                                       std::uint64_t* full, const TileWork& work,
                                                       int i) {
    if (!is_added(ctx) || work.rows == 0) return ptx::mbarrier_arrive(full);
    ptx::mbarrier_arrive_expect(full, kSlotBoxes * kConsumers * kBoxBytes);
    for_each_box(ctx, work, i, [&](int box, int row, int col) {
      at_box(ctx, maps, work, row, col,
             [&](const CUtensorMap& map, int bytes, int c0, int c1, int c2) {
               ptx::tma_load(slot.a + box * kBoxBytes + bytes, map, full, c0, c1, c2);
             });
    });
  }

  static constexpr bool kSumsSteps = kGeneral;
  using StepSums = BiasSums<Shape, kWgrad, Main>;

  static __device__ __forceinline__ Nothing prepare(const Consumer<Shape>&, const TileWork&) {
    return {};
  }

  static __device__ __forceinline__ void finish(Consumer<Shape>& consumer,
                                                const float (&acc)[Shape::kAccumulators],
                                                const TileWork& work, const Nothing&) {
    if (is_added(consumer.ctx)) return add(consumer, acc, work);
    const bool in_out = is_in_out(consumer.ctx, work);
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      std::uint32_t pairs[kPairs];
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        const int j = box * 2 * kPairs + 2 * i;
        pairs[i] = work.rows > 0 ? pack_pair(acc[j], acc[j + 1]) : 0;
      }
      const int place = OutputRing<Shape>::box_of(box, kBoxes);
      if (in_out) {
        consumer.write_transposed(place, pairs);
      } else {
        consumer.write_box(place, pairs);
      }
    }
    if (Borrowed::kEpilogueSlots > 0) consumer.ring.advance();
  }

  static __device__ __forceinline__ void send(Sender<Shape>& sender, const StageMaps& maps,
                                              const TileWork& work) {
    if (is_added(sender.ctx)) return send_sums(sender, maps, work);
    if (sender.lane == 0) acquire_maps(maps.experts, work.expert);
    const int row = work.m + kConsumerRows * sender.index;
    sender.send_boxes(kBoxes, [&](int i, const std::uint8_t* box) {
      store(sender.ctx, maps, work, box, row, work.n + i * kBoxCols);
    });
  }

 private:
  static __device__ __forceinline__ bool is_in_out(const DeviceContext& ctx, const TileWork& work) {
    return kGeneral && ctx.is_in_out(kStage, work.expert);
  }

  /// f(map, bytes before it, its place in the map) for the boxes of the gradient that make up one
  /// of shared memory, which begins at that row and column.
  template <class F>
  static __device__ __forceinline__ void at_box(const DeviceContext& ctx, const StageMaps& maps,
                                                const TileWork& work, int row, int col, F&& f) {
    if (is_in_out(ctx, work)) {
      const RowPlace place = row_place(maps.experts, work.expert, row);
      return f(*place.map, 0, place.row, col, 0);
    }
    for_each_row_box(maps.out0, maps.experts, work.expert, row,
                     [&](const CUtensorMap& map, int before, int first, int expert) {
                       f(map, before * kSwizzleBytes, col, first, expert);
                     });
  }

  /// A box that leaves.
  static __device__ __forceinline__ void store(const DeviceContext& ctx, const StageMaps& maps,
                                               const TileWork& work, const std::uint8_t* box,
                                               int row, int col) {
    at_box(ctx, maps, work, row, col,
           [&](const CUtensorMap& map, int bytes, int c0, int c1, int c2) {
             ptx::tma_store(map, box + bytes, c0, c1, c2);
           });
  }

  static constexpr int kBoxes = Shape::kN / kBoxCols;  // of a tile that is overwritten
  using Borrowed = EmptyEpilogueSlots<Shape, OutputRing<Shape>::borrows(kBoxes)>;

  // Sizes of a tile that is added to.
  static constexpr int kMainCols = kBoxBytes / kConsumerRows / static_cast<int>(sizeof(Main));
  static constexpr int kSlotBoxes = 2;  // of a consumer
  static constexpr int kSlotCols = kSlotBoxes * kMainCols;
  static constexpr int kAddedSlots = Shape::kN / kSlotCols;
  static constexpr int kBoxGroups = 4;  // of columns: 32 bytes each
  static constexpr int kGroupSums = Shape::kAccumulators / kAddedSlots / kSlotBoxes / kBoxGroups;
  static_assert(kSlotBoxes * kConsumers * kBoxBytes <= Shape::kSlotBytes);
  static_assert(kAddedSlots <= Shape::kSlots);
  static constexpr int kHandOver = 0;  // the buffer whose barriers stand for all of them
  // Transposed, the boxes of a slot have the same columns where a box does not hold all 64 rows.
  static constexpr bool kRowsSplit = kMainCols < kConsumerRows;
  static_assert(!kRowsSplit || kSlotBoxes * kMainCols == kConsumerRows);

  static __device__ __forceinline__ bool is_added(const DeviceContext& ctx) {
    return (kStage == Stage::kWgrad1 ? ctx.main_dw1 : ctx.main_dw2) != nullptr;
  }

  /// f(number in the slot, first row, first column) for the boxes of slot `i`: those of consumer 0,
  /// then those of consumer 1.
  template <class F>
  static __device__ __forceinline__ void for_each_box(const DeviceContext& ctx,
                                                      const TileWork& work, int i, F&& f) {
#pragma unroll 1
    for (int consumer = 0; consumer < kConsumers; ++consumer) {
      for_each_box_of(ctx, work, i, consumer,
                      [&](int box, int row, int col) { f(consumer * kSlotBoxes + box, row, col); });
    }
  }
  /// f(number, first row, first column) for one consumer's boxes of slot `i`.
  template <class F>
  static __device__ __forceinline__ void for_each_box_of(const DeviceContext& ctx,
                                                         const TileWork& work, int i, int consumer,
                                                         F&& f) {
    const int row = work.m + consumer * kConsumerRows;
    const int col = work.n + i * kSlotCols;
    const bool rows_split = kRowsSplit && is_in_out(ctx, work);
#pragma unroll
    for (int box = 0; box < kSlotBoxes; ++box) {
      const int further = box * kMainCols;
      f(box, row + (rows_split ? further : 0), col + (rows_split ? 0 : further));
    }
  }
  static __device__ __forceinline__ std::uint8_t* box_of(OperandSlot<Shape>& slot, int consumer,
                                                         int box) {
    return slot.a + (consumer * kSlotBoxes + box) * kBoxBytes;
  }

  /// Adds the sums to the boxes that have come. For an expert without rows none have, and none are
  /// stored: what happens in between does not matter, and a branch would take registers, as would
  /// handing over slot by slot.
  static __device__ __forceinline__ void add(Consumer<Shape>& consumer,
                                             const float (&acc)[Shape::kAccumulators],
                                             const TileWork& work) {
    const bool in_out = is_in_out(consumer.ctx, work);
    consumer.acquire(kHandOver);
#pragma unroll
    for (int i = 0; i < kAddedSlots; ++i) {
      OperandSlot<Shape>& slot = consumer.wait_slot();
      const std::uint8_t* boxes = box_of(slot, consumer.index, 0);
      const float* sums = acc + i * kSlotBoxes * kBoxGroups * kGroupSums;
      if (in_out) {
        add_transposed(boxes, consumer.warp(), sums);
      } else {
        add_to_boxes(boxes + consumer.warp() * (kBoxBytes / 4), sums);
      }
      consumer.ring.advance();
    }
    consumer.commit(kHandOver);
  }

  /// Adds the sums of 16 rows to the slot's columns as rows of boxes.
  static __device__ __forceinline__ void add_transposed(const std::uint8_t* boxes, int warp,
                                                        const float* sums) {
    if constexpr (std::is_same_v<Main, bf16>) {
      const std::uint32_t first = transposed_address(boxes, warp);
#pragma unroll
      for (int i = 0; i < kSlotBoxes * kBoxGroups; ++i) {
        const std::uint32_t at = first + i / kBoxGroups * kBoxBytes;
        add_to_matrices<true>(at + i % kBoxGroups * kTransposedGroupBytes, sums + i * kGroupSums);
      }
    } else {
      const std::uint8_t* box = boxes + warp / 2 * kBoxBytes;
#pragma unroll
      for (int i = 0; i < kSlotBoxes * kBoxGroups; ++i) {  // 8 columns
        add_to_transposed_floats(box + i * 8 * kSwizzleBytes, warp % 2, sums + i * kGroupSums);
      }
    }
  }

  /// Adds the sums to 16 rows of the slot's columns.
  static __device__ __forceinline__ void add_to_boxes(const std::uint8_t* rows, const float* acc) {
    const std::uint32_t first =
        std::is_same_v<Main, bf16> ? box_address(rows) : float_box_address(rows);
#pragma unroll
    for (int box = 0; box < kSlotBoxes; ++box) {
#pragma unroll
      for (int group = 0; group < kBoxGroups; ++group) {
        const std::uint32_t at = group_address(first, group) + box * kBoxBytes;
        const float* sums = acc + (box * kBoxGroups + group) * kGroupSums;
        if constexpr (std::is_same_v<Main, bf16>) {
          add_to_matrices<false>(at, sums);
        } else {
          add_to_float_pairs(at, sums);
        }
      }
    }
  }

  static __device__ __forceinline__ void send_sums(Sender<Shape>& sender, const StageMaps& maps,
                                                   const TileWork& work) {
    const bool stores = sender.lane == 0 && work.rows > 0 && has_rows(work, sender.index);
    if (stores) acquire_maps(maps.experts, work.expert);
    sender.wait_written(kHandOver);
    for (int i = 0; i < kAddedSlots; ++i) {
      if (stores) {
        OperandSlot<Shape>& slot = sender.shared.slots[sender.ring.slot];
        for_each_box_of(sender.ctx, work, i, sender.index, [&](int box, int row, int col) {
          store(sender.ctx, maps, work, box_of(slot, sender.index, box), row, col);
        });
        ptx::bulk_commit();
        ptx::bulk_wait_read<0>();
      }
      __syncwarp();
      sender.give_back_slot();
    }
    sender.give_back(kHandOver);
  }
};

template <class Shape, class Main, bool kGeneral = false>
using Wgrad2 = Wgrad<Shape, Stage::kWgrad2, Main, kGeneral>;
template <class Shape, class Main, bool kGeneral = false>
using Wgrad1 = Wgrad<Shape, Stage::kWgrad1, Main, kGeneral>;

}  // namespace uniep::cuda
