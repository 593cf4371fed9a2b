#pragma once

#include "cuda/device/queue_window.cuh"
#include "cuda/device/reduce.cuh"
#include "cuda/device/sm90/tiles.cuh"
#include "cuda/device/trace.cuh"
#include "cuda/device/waits.cuh"
#include "cuda/device/warp.cuh"

// The scheduler: one warp of a CTA that takes tasks in the order of the queue, waits for their
// inputs and hands them to the other roles, each when the loader is nearly done with the one
// before. Because tasks are taken by whoever is free, a CTA that comes late, or is held up, only
// takes fewer of them.

namespace uniep::cuda {

template <class Shape>
__device__ __forceinline__ TileWork reduce_work(const PassView& v, const Task& task) {
  const std::int64_t first = task.m * v.schedule.token_block;
  const auto tokens =
      static_cast<int>(min_of<std::int64_t>(v.schedule.token_block, v.tokens - first));
  return {.stage = task.stage,
          .first_row = static_cast<int>(first),
          .rows = tokens,
          .k_blocks = ReduceChunks(v, Shape::kSlotBytes, kConsumerThreads).count(tokens)};
}

/// Columns of the output from `n` on that a tile holds.
__device__ __forceinline__ int width_of(const StageGrid& grid, std::int64_t n) {
  return static_cast<int>(min_of(grid.tile_cols, grid.cols - n));
}

/// `last`: the task before. Tiles of one expert follow one another; with few rows each takes less
/// time than a look at memory.
__device__ __forceinline__ TileWork wgrad_work(const PassView& v, const Task& task,
                                               const TileWork& last) {
  TileWork work = last;
  if (last.stage != task.stage || last.expert != task.expert) {
    work = {.stage = task.stage,
            .expert = task.expert,
            .plan_row = static_cast<int>(v.segment_begin[task.expert]),
            .rows = static_cast<int>(v.tokens_per_expert[task.expert])};
    // An expert without rows has one step too: accumulate. Its sums are not used.
    work.k_blocks = max_of(ceil_div(work.rows, kTileK), 1);
  }
  const StageView& stage = v.stage(task.stage);
  work.m = static_cast<int>(task.m) * kTileM;
  work.n = static_cast<int>(task.n) * stage.tile_cols;
  work.height = min_of(kTileM, stage.rows - work.m);
  work.width = min_of(stage.tile_cols, stage.cols - work.n);
  return work;
}

/// A tile of dispatched rows.
template <class Shape>
__device__ __forceinline__ TileWork row_tile_work(const PassView& v, const Task& task) {
  const Tile& tile = v.tiles[task.m];
  const StageGrid grid = stage_grid(v, task.stage);
  const std::int64_t n = task.n * grid.tile_cols;
  return {.stage = task.stage,
          .expert = tile.expert,
          .first_row = call_row<Shape>(v, tile.first_row),
          .saved_row = static_cast<int>(saved_row(v, tile.first_row)),
          .plan_row = static_cast<int>(tile.first_row),
          .rows = tile.rows,
          .n = static_cast<int>(n),
          .height = tile.rows,
          .width = width_of(grid, n),
          .k_blocks = static_cast<int>(ceil_div<std::int64_t>(grid.reduction, kTileK)),
          .tile = static_cast<int>(task.m)};
}

template <class Shape>
__device__ __forceinline__ TileWork work_of(const PassView& v, const Task& task,
                                            const TileWork& last) {
  switch (v.stage(task.stage).grid) {
    case TileGrid::kTokenBlocks:
      return reduce_work<Shape>(v, task);
    case TileGrid::kWeightTiles:
      return wgrad_work(v, task, last);
    case TileGrid::kRowTiles:
      return row_tile_work<Shape>(v, task);
    case TileGrid::kPulls:      // dispatch.cuh
    case TileGrid::kCrossings:  // of groups of several hosts
    case TileGrid::kReturns:
    case TileGrid::kNone:
      break;
  }
  return {.stage = kNoStage};
}

/// Runs in all lanes of the scheduler's warp; the first one does what is not said to be all lanes'.
template <class Shape>
__device__ __forceinline__ void schedule_tasks(const DeviceContext& ctx, const LaunchQueues& queues,
                                               PassShared<Shape>& shared) {
  const bool first_lane = threadIdx.x % 32 == 0;
  QueueWindow window(ctx.view, queues.main, shared.draw);
  Inputs inputs(ctx);
  Tracer trace(ctx.trace, static_cast<int>(blockIdx.x), shared.first_record);
  const std::int64_t size = queues.main.size();
  if (first_lane) shared.work[kWorkSlots - 1].stage = kNoStage;  // the task before the first
  bool running = true;
  for (int taken = 0; running; ++taken) {
    if (taken > 0) ptx::mbarrier_wait(&shared.wanted, (taken - 1) & 1);
    const int slot = taken % kWorkSlots;
    ptx::mbarrier_wait(&shared.work_empty[slot], (taken / kWorkSlots & 1) ^ 1);
    Task task;
    if (window.left() > 0) {
      task = window.next();
    } else {
      std::uint32_t i = first_lane ? atomicAdd(queues.drawn, 1u) : 0;
      i = __shfl_sync(kWholeWarp, i, 0);
      running = i < size;
      if (running) task = window.draw(i);
    }
    if (first_lane) {
      TileWork work{.stage = kNoStage};
      if (running) {
        trace.note([&](TraceRecord& r) {
          r.stage = task.stage;
          r.expert = task.expert;
          r.tile = task.tile;
          r.launch = queues.launch;
          r.taken = ptx::global_nanoseconds();
        });
        const TileWork& last = shared.work[(slot + kWorkSlots - 1) % kWorkSlots];
        work = work_of<Shape>(ctx.view, task, last);
        work.index = name_of(task).tile;
        const bool of_expert = ctx.view.stage(task.stage).grid == TileGrid::kWeightTiles;
        running = inputs.template wait_for<Shape::kMayHaveRing>(task, of_expert);
        if (!running) work.stage = kNoStage;
        trace.note([&](TraceRecord& r) { r.ready = ptx::global_nanoseconds(); });
        trace.advance();
      }
      shared.work[slot] = work;
      ptx::mbarrier_arrive(&shared.work_full[slot]);
    }
    running = __shfl_sync(kWholeWarp, running ? 1 : 0, 0) != 0;
  }
  if (first_lane) trace.finish();
}

/// A role's walk through the tasks that the scheduler hands over, of which every role sees all.
template <class Shape>
class TaskReader {
 public:
  explicit __device__ __forceinline__ TaskReader(PassShared<Shape>& shared) : shared_(shared) {}

  /// Waits for the task at hand. It stays in shared memory until `next`, so that what a role needs
  /// of it behind a main loop takes no registers meanwhile.
  __device__ __forceinline__ const TileWork& task() const {
    ptx::mbarrier_wait(&shared_.work_full[number_ % kWorkSlots], number_ / kWorkSlots & 1);
    return shared_.work[number_ % kWorkSlots];
  }
  /// The thread is done with the task.
  __device__ __forceinline__ void next() {
    ptx::mbarrier_arrive(&shared_.work_empty[number_ % kWorkSlots]);
    ++number_;
  }
  /// Tasks before the one at hand.
  __device__ __forceinline__ int number() const { return number_; }

  /// f(its record in the trace).
  template <class F>
  __device__ __forceinline__ void note(const DeviceTrace& trace, F&& f) const {
    note_record(trace, static_cast<int>(blockIdx.x), shared_.first_record + number_, f);
  }

 private:
  PassShared<Shape>& shared_;
  int number_ = 0;
};

}  // namespace uniep::cuda
