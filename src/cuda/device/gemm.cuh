#pragma once

#include "cuda/device/outputs.cuh"
#include "cuda/device/scheduler.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/stage_maps.h"

// What all GEMM stages share: loads and the main loop. A stage is a struct that says how its
// operands lie (kMajorA, kMajorB), and what each role does for one tile:
//
//   load(maps, slot, full, work, k)    loader: one step of 64 along the reduction
//   kEpilogueSlots                     further pipeline slots, which the loader hands over ...
//   load_epilogue(maps, slot, full, work, i)   ... filled, or empty to be used as output buffers
//   prepare(consumer, work)            consumer: what its epilogue reads ahead of the main loop
//   proceed(consumer, work, prepared)  the same, once the first products are under way; optional
//   finish(consumer, acc, work, prepared)      its epilogue, into output buffers
//   send(sender, maps, work)           sender: the epilogue's stores and signals

namespace uniep::cuda {

/// 64 elements of the reduction of a tile of rows, K-major.
template <class Shape>
__device__ __forceinline__ void load_rows(const StageMaps& maps, OperandSlot<Shape>& slot,
                                          std::uint64_t* full, const TileWork& work, int k) {
  ptx::tma_load(slot.a, maps.a, full, k, work.first_row, 0);
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

/// For stages whose epilogue reads nothing ahead.
struct Nothing {};

/// For stages that borrow a pipeline slot for output buffers, or need none: nothing is loaded.
template <class Shape, bool kBorrow>
struct EmptyEpilogueSlots {
  static constexpr int kEpilogueSlots = kBorrow ? 1 : 0;
  static __device__ __forceinline__ void load_epilogue(const StageMaps&, OperandSlot<Shape>&,
                                                       std::uint64_t* full, const TileWork&, int) {
    ptx::mbarrier_arrive(full);
  }
};

/// Keeps the compiler from moving uses of the accumulators across: it does not know that wgmma
/// writes them until they are waited for.
template <int kCount>
__device__ __forceinline__ void fence_accumulators(float (&acc)[kCount]) {
#pragma unroll
  for (float& v : acc) asm volatile("" : "+f"(v)::"memory");
}

/// acc = sum over the tile's k blocks, ascending, one accumulator per element. `meanwhile` runs
/// under the first products.
template <class S, class Shape, class F>
__device__ __forceinline__ void accumulate(Consumer<Shape>& consumer, int k_blocks,
                                           float (&acc)[Shape::kAccumulators], F&& meanwhile) {
  constexpr ptx::Major kA = S::kMajorA;
  constexpr ptx::Major kB = S::kMajorB;
  SlotRing<Shape>& ring = consumer.ring;
  int last = 0;
  fence_accumulators(acc);
  for (int k = 0; k < k_blocks; ++k) {
    OperandSlot<Shape>& slot = consumer.wait_slot();
    const std::uint32_t a = ptx::shared_address(slot.a) + consumer.index * kBoxBytes;
    const std::uint32_t b = ptx::shared_address(slot.b);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kTileK / 16; ++step) {
      ptx::wgmma_k16<kA, kB>(
          acc, ptx::operand_descriptor(a + step * ptx::k_step_bytes(kA), kA, kBoxBytes),
          ptx::operand_descriptor(b + step * ptx::k_step_bytes(kB), kB, kBoxBytes),
          (k | step) != 0);
    }
    ptx::wgmma_commit();
    if (k == 0) meanwhile();
    if (k > 0) {
      ptx::wgmma_wait<1>();  // the products before these have read their slot
      consumer.release_slot(last);
    }
    last = ring.slot;
    ring.advance();
  }
  ptx::wgmma_wait<0>();
  fence_accumulators(acc);
  if (k_blocks > 0) consumer.release_slot(last);
}

}  // namespace uniep::cuda
