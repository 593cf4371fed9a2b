#pragma once

#include "schedule/block_tasks.h"
#include "schedule/launches.h"
#include "schedule/mixed_blocks.h"

namespace uniep {

/// A block as a queue's table lists it.
struct QueueBlock {
  Stage stage = Stage::kDispatch;
  int block = 0;
  MixedBlocks mix{};

  friend bool operator==(const QueueBlock&, const QueueBlock&) = default;
};

/// Tasks of a block that are drawn at a time: tiles of a weight gradient. Over few rows one is done
/// before the next draw would be.
inline UNIEP_HD std::uint32_t tasks_of_draw(const PassView& v, Stage stage, int expert) {
  if (v.stage(stage).grid != TileGrid::kWeightTiles) return 1;
  constexpr std::int64_t kStepRows = 64;
  const std::int64_t steps =
      max_of<std::int64_t>(ceil_div<std::int64_t>(v.tokens_per_expert[expert], kStepRows), 1);
  return static_cast<std::uint32_t>(max_of<std::int64_t>(v.schedule.wgrad_run / steps, 1));
}

/// What a worker takes from a queue at a time: neighbouring tasks of a block, most often one.
struct Draw {
  Stage stage = Stage::kDispatch;
  BlockGrid grid{};
  std::uint32_t first = 0;  // among the block's tasks
  std::uint32_t count = 0;

  UNIEP_HD Task task(const PassView& v, std::uint32_t i) const {
    return block_task(v, stage, grid, first + i);
  }
};

/// Draw number `index` of a block that has this grid.
inline UNIEP_HD Draw block_draw(const PassView& v, Stage stage, const BlockGrid& grid,
                                std::uint32_t index) {
  const std::uint32_t run = tasks_of_draw(v, stage, grid.expert);
  const std::uint32_t first = index * run;
  return {stage, grid, first, run == 1 ? 1 : min_of(run, grid_tasks(v, stage, grid) - first)};
}

/// In how many draws a block is taken from its queue.
inline UNIEP_HD std::int64_t block_draws(const PassView& v, const QueueBlock& b) {
  const BlockGrid grid = block_grid(v, b.stage, b.block);
  return ceil_div(grid_tasks(v, b.stage, grid), tasks_of_draw(v, b.stage, grid.expert));
}

/// Block number `i` of a track.
inline UNIEP_HD QueueBlock queue_block(const PassView& v, const TrackList& queue, int track,
                                       int i) {
  const Track& t = queue.tracks[track];
  return {.stage = t.stage, .block = t.first + i, .mix = MixedBlocks::of(v, queue, track, i)};
}

/// Calls f(QueueBlock) for every block of the queue, in the order of its table.
template <class F>
UNIEP_HD void for_each_block(const PassView& v, const TrackList& queue, F&& f) {
  const int end = queue.end();
  for (int step = 0; step < end; ++step) {
    for (int i = 0; i < queue.count; ++i) {
      const Track& t = queue.tracks[i];
      for (int b = t.blocks_before(step); b < t.blocks_before(step + 1); ++b) {
        f(queue_block(v, queue, i, b));
      }
    }
  }
}

inline UNIEP_HD int num_blocks(const TrackList& queue) {
  int blocks = 0;
  for (int i = 0; i < queue.count; ++i) blocks += queue.tracks[i].count;
  return blocks;
}

/// How many blocks `for_each_block` visits before block `first + i` of a track: what lets threads
/// fill a queue's table side by side.
inline UNIEP_HD int queue_position(const TrackList& queue, int track, int i) {
  const int step = queue.tracks[track].step_of(i);
  int before = i;
  for (int other = 0; other < queue.count; ++other) {
    // At the same step, earlier tracks go first.
    if (other != track) before += queue.tracks[other].blocks_before(step + (other < track ? 1 : 0));
  }
  return before;
}

/// A queue of tasks as a table of its blocks and the number of draws before each, as if none were
/// mixed: draw i of the queue is found by binary search, with no list of tasks.
struct QueueView {
  const QueueBlock* blocks = nullptr;
  const std::int64_t* begin = nullptr;  // [count + 1], ascending
  int count = 0;

  UNIEP_HD std::int64_t size() const { return begin[count]; }

  /// The last block that begins at or before `index`, if none were mixed.
  UNIEP_HD int find(std::int64_t index) const {
    int low = 0;
    int high = count - 1;
    while (low < high) {
      const int mid = (low + high + 1) / 2;
      if (begin[mid] <= index) {
        low = mid;
      } else {
        high = mid - 1;
      }
    }
    return low;
  }
};

/// Draw `index` of a queue, given the block of the table that would hold it if none were mixed.
inline UNIEP_HD Draw draw_at(const PassView& v, const QueueView& q, int entry, std::int64_t index) {
  const MixedBlocks mix = q.blocks[entry].mix;
  const auto begin = [&](int i) { return q.begin[i]; };
  const std::int64_t at = mix.listed_index(begin, entry, index, v.schedule.mix_run);
  entry = mix.first_of(entry);
  while (q.begin[entry + 1] <= at) ++entry;
  const QueueBlock& block = q.blocks[entry];
  return block_draw(v, block.stage, block_grid(v, block.stage, block.block),
                    static_cast<std::uint32_t>(at - q.begin[entry]));
}

/// Draw `index` of the queue, 0 <= index < size().
inline UNIEP_HD Draw queue_draw(const PassView& v, const QueueView& q, std::int64_t index) {
  return draw_at(v, q, q.find(index), index);
}

/// Calls f(Task) for every task of the queue, in order.
template <class F>
UNIEP_HD void for_each_task(const PassView& v, const QueueView& q, F&& f) {
  for (std::int64_t i = 0; i < q.size(); ++i) {
    const Draw draw = queue_draw(v, q, i);
    for (std::uint32_t t = 0; t < draw.count; ++t) f(draw.task(v, t));
  }
}

}  // namespace uniep
