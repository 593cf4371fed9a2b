#pragma once

#include "cuda/device/tiles.cuh"
#include "cuda/device/trace.cuh"
#include "cuda/device/waits.cuh"
#include "cuda/device/warp.cuh"

// The scheduler: one warp of a CTA that takes tasks in the order of the queue, waits for their
// inputs and hands them to the other roles, each when the loader is nearly done with the one
// before. Because tasks are taken by whoever is free, a CTA that comes late, or is held up, only
// takes fewer of them.

namespace uniep::cuda {

/// Columns that the consumers sum at a time in reduce, a vector a thread.
inline constexpr int kReduceStep = 128 * kConsumers * kVectorElements;

/// Columns of a reduce piece: as many as let K rows of them fit a pipeline slot, or a step's where
/// that leaves fewer threads without a vector.
template <class Shape>
__device__ __forceinline__ int reduce_columns(const PassView& v) {
  const auto hidden = static_cast<int>(v.hidden);
  const int most = Shape::kSlotBytes / (2 * v.topk) / kVectorElements * kVectorElements;
  const int pieces = ceil_div(hidden, most);
  const int columns = round_up(ceil_div(hidden, pieces), kVectorElements);
  const bool by_steps = pieces * ceil_div(columns, kReduceStep) > ceil_div(hidden, kReduceStep);
  return by_steps ? min_of(columns, kReduceStep) : columns;
}

/// Tokens of a reduce piece, of all whose columns: more than one where a slot holds the rows of
/// more, up to a lane for each row.
template <class Shape>
__device__ __forceinline__ int reduce_tokens(const PassView& v) {
  if (reduce_columns<Shape>(v) < v.hidden) return 1;
  const int row_bytes = 2 * static_cast<int>(v.hidden);
  return max_of(1, min_of(Shape::kSlotBytes / (v.topk * row_bytes), 32 / v.topk));
}

template <class Shape>
__device__ __forceinline__ TileWork reduce_work(const PassView& v, const Task& task) {
  const std::int64_t first = task.m * v.schedule.token_block;
  const auto tokens =
      static_cast<int>(min_of<std::int64_t>(v.schedule.token_block, v.tokens - first));
  const int pieces = ceil_div(static_cast<int>(v.hidden), reduce_columns<Shape>(v));
  return {.stage = task.stage,
          .first_row = static_cast<int>(first),
          .rows = tokens,
          .k_blocks = ceil_div(tokens, reduce_tokens<Shape>(v)) * pieces};
}

/// Columns of the output from `n` on that a tile holds.
__device__ __forceinline__ int width_of(const StageGrid& grid, std::int64_t n) {
  return static_cast<int>(min_of(grid.tile_cols, grid.cols - n));
}

__device__ __forceinline__ TileWork wgrad_work(const PassView& v, const Task& task) {
  const StageGrid grid = stage_grid(v, task.stage);
  const auto rows = static_cast<int>(v.tokens_per_expert[task.expert]);
  const std::int64_t m = task.m * kTileM, n = task.n * grid.tile_cols;
  return {.stage = task.stage,
          .expert = task.expert,
          .first_row = static_cast<int>(v.segment_begin[task.expert]),
          .rows = rows,
          .m = static_cast<int>(m),
          .n = static_cast<int>(n),
          .height = static_cast<int>(min_of<std::int64_t>(kTileM, grid.rows - m)),
          .width = width_of(grid, n),
          // An expert without rows has one step too: accumulate. Its sums are not used.
          .k_blocks = max_of(ceil_div(rows, kTileK), 1)};
}

/// A tile of dispatched rows.
__device__ __forceinline__ TileWork row_tile_work(const PassView& v, const Task& task) {
  const Tile& tile = v.tiles[task.m];
  const StageGrid grid = stage_grid(v, task.stage);
  const std::int64_t n = task.n * grid.tile_cols;
  return {.stage = task.stage,
          .expert = tile.expert,
          .first_row = static_cast<int>(tile.first_row),
          .rows = tile.rows,
          .n = static_cast<int>(n),
          .height = tile.rows,
          .width = width_of(grid, n),
          .k_blocks = static_cast<int>(ceil_div<std::int64_t>(grid.reduction, kTileK)),
          .tile = static_cast<int>(task.m)};
}

template <class Shape>
__device__ __forceinline__ TileWork work_of(const PassView& v, const Task& task) {
  switch (task.stage) {
    case Stage::kReduce:
      return reduce_work<Shape>(v, task);
    case Stage::kWgrad2:
    case Stage::kWgrad1:
      return wgrad_work(v, task);
    default:
      return row_tile_work(v, task);
  }
}

/// The part of a queue's table at which the scheduler stands, a block and its grid a lane: finding
/// tasks one after another takes no reads of memory until the part has been walked through.
class QueueWindow {
 public:
  __device__ __forceinline__ QueueWindow(const PassView& view, const QueueView& queue)
      : view_(view), queue_(queue), lane_(static_cast<int>(threadIdx.x) % 32) {
    read(0);
  }

  /// What `queue_task` returns. By all lanes, of the same index, which is never less than the last.
  __device__ __forceinline__ Task task(std::uint32_t index) {
    int entry = lane_of(index);
    // Those that it is mixed with stand on either side, and the end of the last counts too.
    static_assert(2 * kMostMixedBlocks <= 32, "no place in the window would do");
    while (entry >= 32 - kMostMixedBlocks) {
      read(first_ + entry - (kMostMixedBlocks - 1));
      entry = lane_of(index);
    }
    const auto mix = __builtin_bit_cast(
        QueueBlock::Mix, of_lane(__builtin_bit_cast(std::uint32_t, block_.mix), entry));
    const auto begin = [&](int lane) { return std::int64_t{of_lane(begin_, lane)}; };
    const auto at = static_cast<std::uint32_t>(unmixed_index(view_, mix, begin, entry, index));
    const int found = lane_of(at);
    const BlockGrid grid{of_lane(grid_.expert, found), of_lane(grid_.rows, found),
                         of_lane(grid_.cols, found), of_lane(grid_.first, found)};
    return block_task(view_, static_cast<Stage>(of_lane(static_cast<int>(block_.stage), found)),
                      grid, at - of_lane(begin_, found));
  }

 private:
  /// The block that holds task `index` if none are mixed.
  __device__ __forceinline__ int lane_of(std::uint32_t index) const {
    return __popc(__ballot_sync(kWholeWarp, begin_ <= index)) - 1;
  }

  template <class T>
  static __device__ __forceinline__ T of_lane(T value, int lane) {
    return __shfl_sync(kWholeWarp, value, lane);
  }

  __device__ __forceinline__ void read(int first) {
    first_ = first;
    const int i = first + lane_;
    begin_ = i <= queue_.count ? static_cast<std::uint32_t>(queue_.begin[i]) : UINT32_MAX;
    if (i >= queue_.count) return;
    block_ = queue_.blocks[i];
    grid_ = block_grid(view_, block_);
  }

  const PassView& view_;
  const QueueView& queue_;
  const int lane_;
  int first_ = 0;            // block of lane 0
  std::uint32_t begin_ = 0;  // of this lane's block; a ticket has no more bits either
  QueueBlock block_{};
  BlockGrid grid_{};
};

/// By all lanes of the scheduler's warp; the first one does what is not said to be all lanes'.
template <class Shape>
__device__ __forceinline__ void schedule_tasks(const DeviceContext& ctx, const LaunchQueues& queues,
                                               PassShared<Shape>& shared) {
  const bool first_lane = threadIdx.x % 32 == 0;
  QueueWindow window(ctx.view, queues.main);
  Inputs inputs(ctx);
  Tracer trace(ctx.trace, static_cast<int>(blockIdx.x), shared.first_record);
  const std::int64_t size = queues.main.size();
  bool running = true;
  for (int drawn = 0; running; ++drawn) {
    if (drawn > 0) ptx::mbarrier_wait(&shared.wanted, (drawn - 1) & 1);
    const int slot = drawn % kWorkSlots;
    ptx::mbarrier_wait(&shared.work_empty[slot], (drawn / kWorkSlots & 1) ^ 1);
    std::uint32_t i = first_lane ? atomicAdd(queues.ticket, 1u) : 0;
    i = __shfl_sync(kWholeWarp, i, 0);
    running = i < size;
    Task task;
    if (running) task = window.task(i);
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
        work = work_of<Shape>(ctx.view, task);
        work.index = name_of(task).tile;
        running = inputs.wait_for(task);
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
