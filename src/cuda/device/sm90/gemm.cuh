#pragma once

#include "cuda/device/sm90/expert_boxes.cuh"
#include "cuda/device/sm90/outputs.cuh"
#include "cuda/device/sm90/scheduler.cuh"
#include "cuda/device/sm90/wgmma.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/stage_maps.h"

// What all GEMM stages share: loads and the main loop. A stage is a struct that says how its
// operands lie (kMajorA, kMajorB), and what each role does for one tile:
//
//   load(ctx, maps, slot, full, work, first_token, k)   loader: one step of 64 along the reduction
//   kEpilogueSlots                     further pipeline slots, which the loader hands over ...
//   epilogue_slots(ctx)                ... or how many, where the pass decides
//   load_epilogue(ctx, maps, slot, full, work, i)   filled, or empty to be used as output buffers
//   prefetch_epilogue(ctx, maps, work)   of these, what comes from far away; optional
//   prepare(consumer, work)            consumer: what its epilogue reads ahead of the main loop
//   proceed(consumer, work, prepared)  the same, once the first products are under way; optional
//   finish(consumer, acc, work, prepared)      its epilogue, into output buffers
//   send(sender, maps, work)           sender: the epilogue's stores and signals
//   kSumsSteps, StepSums               what it sums over the operands ahead of that; optional
//   kReadsAnyOrder                     its weights may be [in, out], and then lie the other way;
//                                      optional

namespace uniep::cuda {

/// Whether a consumer has rows of the tile: the last ones of an expert, or of a weight gradient,
/// may all be the first consumer's.
__device__ __forceinline__ bool has_rows(const TileWork& work, int consumer) {
  return work.height > kConsumerRows * consumer;
}

/// The first row of a tile of rows in its tensor.
template <Tensor t>
__device__ __forceinline__ int first_row_in(const DeviceContext& ctx, const TileWork& work) {
  return is_saved<t>(ctx.view) ? work.saved_row : work.first_row;
}

/// The operand of a stage whose rows are copies of tokens; kNone: neither's are.
template <class S>
constexpr Tensor dispatched_operand() {
  constexpr const TensorList& kReads = row_of(S::kStage).reads;
  if (kTokensOf<kReads[0]> != Tensor::kNone) return kReads[0];
  return kTokensOf<kReads[1]> != Tensor::kNone ? kReads[1] : Tensor::kNone;
}

/// If the tile reads tokens where they lie (tokens_in_place.h), the row of the plan that is the
/// first token, else -1. Looked up once for each tile.
template <class S>
__device__ __forceinline__ int first_token_row(const DeviceContext& ctx, const TileWork& work) {
  if (!is_in_place<dispatched_operand<S>()>(ctx.view, work.expert)) return -1;
  return static_cast<int>(__ldg(ctx.view.segment_begin + work.expert));
}

/// Rows of an operand: a map, and where in it they begin.
struct OperandRows {
  const CUtensorMap* map;
  int row;
};
/// The rows of operand `t` from `plan_row` on: in its tensor, where `map` has them from `row` on,
/// or their tokens. `first_token`: first_token_row.
template <Tensor t>
__device__ __forceinline__ OperandRows operand_rows(const StageMaps& maps, const CUtensorMap& map,
                                                    int row, int plan_row, int first_token) {
  if (kTokensOf<t> != Tensor::kNone && first_token >= 0) {
    return {&maps.tokens, plan_row - first_token};
  }
  return {&map, row};
}

/// 64 elements of the reduction of a tile of rows of `t`, the left operand, K-major: of the halves
/// that have rows.
template <Tensor t, class Shape>
__device__ __forceinline__ void load_rows(const DeviceContext& ctx, const StageMaps& maps,
                                          OperandSlot<Shape>& slot, std::uint64_t* full,
                                          const TileWork& work, int first_token, int k) {
  const OperandRows rows =
      operand_rows<t>(maps, maps.a, first_row_in<t>(ctx, work), work.plan_row, first_token);
  for (int half = 0; half < kConsumers && has_rows(work, half); ++half) {
    ptx::tma_load(slot.a + half * kBoxBytes, *rows.map, full, k, rows.row + half * kConsumerRows,
                  0);
  }
}

/// Bytes that `load` brings. What lies out of a tensor counts, rows of a half without any do not.
/// For an expert without rows, whose one step is there for its slot alone, nothing is loaded.
template <class S, class Shape>
__device__ __forceinline__ int step_bytes(const TileWork& work) {
  if (work.rows == 0) return 0;
  const bool by_halves = S::kMajorA == ptx::Major::kK;  // load_rows
  return Shape::kSlotBytes - (by_halves && !has_rows(work, kConsumers - 1) ? kBoxBytes : 0);
}

/// `count` squares of 64 x 64 side by side, from column `col` and row `row` on: an MN-major
/// operand.
template <int count>
__device__ __forceinline__ void load_squares(std::uint8_t* to, const CUtensorMap& map,
                                             std::uint64_t* full, int col, int row, int expert) {
#pragma unroll
  for (int i = 0; i < count; ++i) {
    ptx::tma_load(to + i * kBoxBytes, map, full, col + 64 * i, row, expert);
  }
}

/// Whether the stage's weights may be [in, out], and whether they are in this tile.
template <class S>
constexpr bool may_read_in_out() {
  if constexpr (requires { S::kReadsAnyOrder; }) {
    return S::kReadsAnyOrder;
  } else {
    return false;
  }
}
template <class S>
__device__ __forceinline__ bool reads_in_out(const DeviceContext& ctx, const TileWork& work) {
  return may_read_in_out<S>() && ctx.is_in_out(S::kStage, work.expert);
}

/// The operands of a data gradient: rows, and weights whose reduction is not contiguous, but where
/// they are [in, out].
template <class S, class Shape>
__device__ __forceinline__ void load_rows_and_weights(const DeviceContext& ctx,
                                                      const StageMaps& maps,
                                                      OperandSlot<Shape>& slot, std::uint64_t* full,
                                                      const TileWork& work, int first_token,
                                                      int k) {
  load_rows<row_of(S::kStage).reads[0]>(ctx, maps, slot, full, work, first_token, k);
  if (k == 0) acquire_maps(maps.experts, work.expert);
  if (reads_in_out<S>(ctx, work)) {
    const RowPlace place = row_place(maps.experts, work.expert, k);
    return ptx::tma_load(slot.b, *place.map, full, place.row, work.n, 0);
  }
  for_each_row_box(maps.b, maps.experts, work.expert, k,
                   [&](const CUtensorMap& map, int before, int row, int expert) {
                     load_squares<Shape::kN / 64>(slot.b + before * kSwizzleBytes, map, full,
                                                  work.n, row, expert);
                   });
}

/// What stages have whose epilogue reads nothing ahead.
struct Nothing {
  Nothing() = default;
  __device__ __forceinline__ Nothing(const DeviceContext&, const TileWork&) {}
};

template <class S>
__device__ __forceinline__ int epilogue_slots(const DeviceContext& ctx) {
  if constexpr (requires { S::epilogue_slots(ctx); }) {
    return S::epilogue_slots(ctx);
  } else {
    return S::kEpilogueSlots;
  }
}

/// Keeps the compiler from moving uses of the accumulators across: it does not know that wgmma
/// writes them until they are waited for.
template <int kCount>
__device__ __forceinline__ void fence_accumulators(float (&acc)[kCount]) {
#pragma unroll
  for (float& v : acc) asm volatile("" : "+f"(v)::"memory");
}

/// Whether the tile has half of its columns or less, as the last one of a width of 2880: then only
/// these are multiplied. Not in fc1 and refc1, whose gate and up columns stand side by side: with
/// two products a step registers do not suffice.
template <class S, ptx::Major kB, class Shape>
__device__ constexpr bool can_be_narrow() {
  return kB == S::kMajorB && Shape::kN == 256 && row_of(S::kStage).halves == 1;
}

/// acc += the products of one slot; `kB`: how the right operand lies; `kNarrow`: of the first half
/// of the columns; `kFirst`: the sums begin with these. That is known to the compiler, so that no
/// accumulator has a value before: where it only followed from k, the registers of all of them were
/// lost to the epilogue of the tile before.
template <class S, ptx::Major kB, bool kNarrow, bool kFirst, class Shape>
__device__ __forceinline__ void multiply(float (&acc)[Shape::kAccumulators], std::uint32_t a,
                                         std::uint32_t b) {
  constexpr ptx::Major kA = S::kMajorA;
  constexpr int kSums = Shape::kAccumulators / (kNarrow ? 2 : 1);
#pragma unroll
  for (int step = 0; step < kTileK / 16; ++step) {
    ptx::wgmma_k16<kA, kB>(reinterpret_cast<float(&)[kSums]>(acc),
                           ptx::operand_descriptor(a + step * ptx::k_step_bytes(kA), kA, kBoxBytes),
                           ptx::operand_descriptor(b + step * ptx::k_step_bytes(kB), kB, kBoxBytes),
                           !kFirst || step != 0);
  }
}

/// Begins the products of the next slot, and returns its number.
template <class S, ptx::Major kB, bool kNarrow, bool kFirst, class Shape>
__device__ __forceinline__ int multiply_next(Consumer<Shape>& consumer,
                                             float (&acc)[Shape::kAccumulators]) {
  OperandSlot<Shape>& operands = consumer.wait_slot();
  const int slot = consumer.ring.slot;
  ptx::wgmma_fence();
  multiply<S, kB, kNarrow, kFirst, Shape>(
      acc, ptx::shared_address(operands.a) + consumer.index * kBoxBytes,
      ptx::shared_address(operands.b));
  ptx::wgmma_commit();
  consumer.ring.advance();
  return slot;
}

/// acc = sum over k blocks, ascending, one accumulator per element; in columns that a narrow tile
/// does not have, 0. There is at least one block: a tile that might have none would keep the
/// accumulators of the tile before. `meanwhile` runs under the first products.
template <class S, ptx::Major kB, bool kNarrow, class Shape, class F>
__device__ __forceinline__ void accumulate(Consumer<Shape>& consumer, int k_blocks,
                                           float (&acc)[Shape::kAccumulators], F&& meanwhile) {
  int last = multiply_next<S, kB, kNarrow, true, Shape>(consumer, acc);
  meanwhile();
  for (int k = 1; k < k_blocks; ++k) {
    const int slot = multiply_next<S, kB, kNarrow, false, Shape>(consumer, acc);
    ptx::wgmma_wait<1>();  // the products before these have read their slot
    consumer.release_slot(last);
    last = slot;
  }
  ptx::wgmma_wait<0>();
  fence_accumulators(acc);
  consumer.release_slot(last);
#pragma unroll
  for (int i = Shape::kAccumulators / (kNarrow ? 2 : 1); i < Shape::kAccumulators; ++i) acc[i] = 0;
}

/// Hands slots back that a consumer has no products for.
template <class Shape>
__device__ __forceinline__ void pass_slots(Consumer<Shape>& consumer, int count) {
  for (int k = 0; k < count; ++k) {
    consumer.wait_slot();
    consumer.release_slot(consumer.ring.slot);
    consumer.ring.advance();
  }
}

/// The main loop of a tile, as much of it as there is: sums of rows that the tile does not hold may
/// be anything, and come from one block.
template <class S, ptx::Major kB, class Shape, class F>
__device__ __forceinline__ void sum_products(Consumer<Shape>& consumer, const TileWork& work,
                                             float (&acc)[Shape::kAccumulators], F&& meanwhile) {
  const int k_blocks = has_rows(work, consumer.index) ? work.k_blocks : 1;
  bool narrow = false;
  if constexpr (can_be_narrow<S, kB, Shape>()) {
    narrow = work.width <= Shape::kN / 2;
    if (narrow) accumulate<S, kB, true>(consumer, k_blocks, acc, meanwhile);
  }
  if (!narrow) accumulate<S, kB, false>(consumer, k_blocks, acc, meanwhile);
  pass_slots(consumer, work.k_blocks - k_blocks);
}

/// The 64 rows or columns of a sender are summed in parts, a part by one of the tiles with the same
/// left operand: so none takes longer than its products.
inline constexpr int kSumParts = 4;

/// Whether senders sum over the steps of a stage's tiles too, and so are among those who hand its
/// slots back: of those that have a part, where experts have biases. Of all other slots the loader
/// says so for them.
template <class S>
constexpr bool may_sum_steps() {
  if constexpr (requires { S::kSumsSteps; }) {
    return S::kSumsSteps;
  } else {
    return false;
  }
}
template <class S, class Shape>
__device__ __forceinline__ bool sums_steps(const PassView& v, const TileWork& work) {
  return may_sum_steps<S>() && v.choice.has_bias && work.n < kSumParts * Shape::kN;
}

/// The sender's share of such a main loop, over its consumer's 64 rows or columns of the left
/// operand. `ring`: where the tile begins. When a sender comes here, its consumer has seen all
/// slots before these full; so it takes no stale parity for the current one. Nor can it miss a
/// slot, which the loader does not fill again without it.
template <class S, class Shape>
__device__ __forceinline__ void sum_steps(Sender<Shape>& sender, const TileWork& work,
                                          SlotRing<Shape> ring) {
  typename S::StepSums sums(sender, work);
  for (int k = 0; k < work.k_blocks; ++k) {
    ptx::mbarrier_wait(&sender.shared.full[ring.slot], ring.parity);
    __syncwarp();  // matrices are read by whole warps
    sums.add(sender, work, sender.shared.slots[ring.slot].a + sender.index * kBoxBytes, k);
    ptx::mbarrier_arrive(&sender.shared.empty[ring.slot]);
    ring.advance();
  }
  sums.store(sender, work);
}

}  // namespace uniep::cuda
