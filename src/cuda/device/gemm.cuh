#pragma once

#include "cuda/device/fragments.cuh"
#include "cuda/device/tiles.cuh"
#include "cuda/device/waits.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/stage_maps.h"

// What all GEMM stages share: the scheduler warp, the loader, the main loop. A stage is a struct
// that says how its operands lie (kMajorA, kMajorB), how one step of 64 k's is loaded, and what its
// epilogue does with the accumulators:
//
//   static TileWork work(const DeviceContext&, const Task&);
//   static void load(const StageMaps&, GemmShared&, int slot, const TileWork&, int k_block);
//   static constexpr int kEpilogueLoads;  // further pipeline slots, filled for the epilogue
//   static void load_epilogue(...);
//   struct Epilogue { Epilogue(ctx, maps, shared); run(acc, work, stages); finish(); };

namespace uniep::cuda {

/// The tile of dispatched rows that a task names, its columns from `n` on, `reduction` long.
__device__ __forceinline__ TileWork row_tile_work(const DeviceContext& ctx, const Task& task, int n,
                                                  std::int64_t reduction) {
  const Tile& tile = ctx.view.tiles[task.m];
  return {.expert = tile.expert,
          .first_row = static_cast<int>(tile.first_row),
          .rows = tile.rows,
          .n = n,
          .k_blocks = static_cast<int>(ceil_div<std::int64_t>(reduction, kTileK)),
          .counter = static_cast<int>(task.m)};
}

/// 64 elements of the reduction of a tile of rows, K-major.
__device__ __forceinline__ void load_rows(const StageMaps& maps, GemmShared& shared, int slot,
                                          const TileWork& work, int k) {
  ptx::tma_load(shared.a[slot], maps.a, &shared.full[slot], k, work.first_row, 0);
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

/// What a stage without loads for its epilogue inherits.
struct NoEpilogueLoads {
  static constexpr int kEpilogueLoads = 0;
  static __device__ __forceinline__ void load_epilogue(const StageMaps&, GemmShared&, int,
                                                       const TileWork&, int) {}
};

/// The scheduler: takes this CTA's tasks in queue order, waits for their inputs and hands them on,
/// up to kWorkSlots ahead of the consumers.
template <class Stage>
__device__ __forceinline__ void schedule_tiles(const DeviceContext& ctx, GemmShared& shared) {
  WorkRing ring;
  const std::int64_t size = ctx.queue.size();
  bool running = true;
  for (std::int64_t i = blockIdx.x; running; i += gridDim.x) {
    TileWork work{};
    if (i < size) {
      const Task task = queue_task(ctx.view, ctx.queue, i);
      if (wait_for_inputs(ctx, task)) {
        work = Stage::work(ctx, task);
        work.task = name_of(task);
        work.valid = 1;
      }
    }
    // The copy engine reads what these waits have acquired.
    ptx::fence_proxy_async();
    ptx::mbarrier_wait(&shared.work_empty[ring.slot], ring.parity ^ 1);
    shared.work[ring.slot] = work;
    ptx::mbarrier_arrive(&shared.work_full[ring.slot]);
    running = work.valid != 0;
    ring.advance();
  }
}

/// Takes the next tile from the scheduler; `release` frees its slot.
__device__ __forceinline__ TileWork next_tile(GemmShared& shared, WorkRing& ring, bool release) {
  ptx::mbarrier_wait(&shared.work_full[ring.slot], ring.parity);
  const TileWork work = shared.work[ring.slot];
  if (release) ptx::mbarrier_arrive(&shared.work_empty[ring.slot]);
  ring.advance();
  return work;
}

/// The loader: one thread that keeps the pipeline full.
template <class Stage>
__device__ __forceinline__ void load_tiles(const StageMaps& maps, GemmShared& shared) {
  StageRing stages;
  WorkRing ring;
  for (;;) {
    const TileWork work = next_tile(shared, ring, true);
    if (work.valid == 0) return;
    for (int k = 0; k < work.k_blocks; ++k) {
      ptx::mbarrier_wait(&shared.empty[stages.slot], stages.parity ^ 1);
      ptx::mbarrier_arrive_expect(&shared.full[stages.slot], (kTileM + kTileN) * kTileK * 2);
      Stage::load(maps, shared, stages.slot, work, k);
      stages.advance();
    }
    for (int i = 0; i < Stage::kEpilogueLoads; ++i) {
      ptx::mbarrier_wait(&shared.empty[stages.slot], stages.parity ^ 1);
      Stage::load_epilogue(maps, shared, stages.slot, work, i);
      stages.advance();
    }
  }
}

/// Frees a pipeline slot; by all warps of the consumers.
__device__ __forceinline__ void release_slot(GemmShared& shared, int slot) {
  if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(&shared.empty[slot]);
}

/// Keeps the compiler from moving uses of the accumulators across: it does not know that wgmma
/// writes them until they are waited for.
__device__ __forceinline__ void fence_accumulators(float (&acc)[128]) {
#pragma unroll
  for (float& v : acc) asm volatile("" : "+f"(v)::"memory");
}

/// acc = sum over the tile's k blocks, ascending, one accumulator per element.
template <class Stage>
__device__ __forceinline__ void accumulate(GemmShared& shared, StageRing& stages, int consumer,
                                           int k_blocks, float (&acc)[128]) {
  constexpr ptx::Major kA = Stage::kMajorA;
  constexpr ptx::Major kB = Stage::kMajorB;
  int last = 0;
  fence_accumulators(acc);
  for (int k = 0; k < k_blocks; ++k) {
    ptx::mbarrier_wait(&shared.full[stages.slot], stages.parity);
    const std::uint32_t a = ptx::shared_address(shared.a[stages.slot]) + consumer * kBoxBytes;
    const std::uint32_t b = ptx::shared_address(shared.b[stages.slot]);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kTileK / 16; ++step) {
      ptx::wgmma_m64n256k16<kA, kB>(
          acc, ptx::operand_descriptor(a + step * ptx::k_step_bytes(kA), kA, kBoxBytes),
          ptx::operand_descriptor(b + step * ptx::k_step_bytes(kB), kB, kBoxBytes),
          (k | step) != 0);
    }
    ptx::wgmma_commit();
    if (k > 0) {
      ptx::wgmma_wait<1>();  // the products before these have read their slot
      release_slot(shared, last);
    }
    last = stages.slot;
    stages.advance();
  }
  ptx::wgmma_wait<0>();
  fence_accumulators(acc);
  if (k_blocks > 0) release_slot(shared, last);
}

/// The body of a GEMM kernel: one CTA per SM, kThreads threads.
template <class Stage>
__device__ __forceinline__ void run_gemm(const DeviceContext& ctx, const StageMaps& maps,
                                         GemmShared& shared) {
  const int warpgroup = static_cast<int>(threadIdx.x) / 128;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kPipelineStages; ++i) {
      ptx::mbarrier_init(&shared.full[i], 1);
      ptx::mbarrier_init(&shared.empty[i], kConsumerWarps);
    }
    for (int i = 0; i < kWorkSlots; ++i) {
      ptx::mbarrier_init(&shared.work_full[i], 1);
      ptx::mbarrier_init(&shared.work_empty[i], 1 + kConsumerWarps);
    }
    for (int& warps : shared.warps_done) warps = 0;
    ptx::mbarrier_init_fence();
  }
  __syncthreads();
  if (warpgroup == 0) {
    ptx::give_registers<kProducerRegisters>();
    if (threadIdx.x == 0) load_tiles<Stage>(maps, shared);
    if (threadIdx.x == 32) schedule_tiles<Stage>(ctx, shared);
  } else {
    ptx::take_registers<kConsumerRegisters>();
    StageRing stages;
    WorkRing ring;
    typename Stage::Epilogue epilogue(ctx, maps, shared);
    float acc[128];
    for (;;) {
      __syncwarp();
      const TileWork work = next_tile(shared, ring, false);
      __syncwarp();
      if (threadIdx.x % 32 == 0) {
        const int slot = (ring.slot + kWorkSlots - 1) % kWorkSlots;
        ptx::mbarrier_arrive(&shared.work_empty[slot]);
      }
      if (work.valid == 0) break;
      epilogue.prepare(work);
      accumulate<Stage>(shared, stages, warpgroup - 1, work.k_blocks, acc);
      epilogue.run(acc, work, stages);
    }
    epilogue.finish();
  }
}

}  // namespace uniep::cuda
