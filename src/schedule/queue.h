#pragma once

#include "schedule/launches.h"

namespace uniep {

/// One tile task.
struct Task {
  Stage stage = Stage::kDispatch;
  int expert = -1;        // local expert, or -1
  std::int64_t tile = 0;  // index within the stage, for reports
  std::int64_t m = 0;     // dispatch: first pull; GEMM: tile; reduce: token block; wgrad: row tile
  std::int64_t n = 0;     // dispatch: pulls; GEMM, wgrad: column tile
};

/// A block as a queue's table lists it.
struct QueueBlock {
  /// Neighbours in the table whose tasks are mixed: those of the first with those of all others.
  struct Mix {
    std::int16_t blocks = 0;  // this one included; 0: none
    std::int16_t place = 0;   // of this one among them

    friend bool operator==(const Mix&, const Mix&) = default;
  };

  Stage stage = Stage::kDispatch;
  int block = 0;
  Mix mix{};

  friend bool operator==(const QueueBlock&, const QueueBlock&) = default;
};

/// What the tasks of a block have in common: the grid that they are the tiles of. Fewer than 2^32
/// tasks, so that a GPU, which has no division of 64 bits, finds one in few steps.
struct BlockGrid {
  int expert = -1;         // local expert, or -1
  std::uint32_t rows = 0;  // tiles; dispatch: pulls; reduce: token blocks
  std::uint32_t cols = 1;
  std::int64_t first = 0;  // tile of rows, or pull; wgrad: 0, since rows are the gradient's
};

inline UNIEP_HD BlockGrid block_grid(const PassView& v, QueueBlock b) {
  const auto count = [](std::int64_t n) { return static_cast<std::uint32_t>(n); };
  switch (b.stage) {
    case Stage::kDispatch:
      return {.expert = v.expert_of_block(b.block),
              .rows = count(v.pull_begin[b.block + 1] - v.pull_begin[b.block]),
              .first = v.pull_begin[b.block]};
    case Stage::kReduce:
      return {.rows = count(v.num_token_blocks())};
    case Stage::kWgrad2:
    case Stage::kWgrad1:
      return {.expert = v.expert_order[b.block],
              .rows = ceil_div(count(stage_grid(v, b.stage).rows), count(v.schedule.tile_m)),
              .cols = column_tiles(v, b.stage)};
    default:
      return {.expert = v.expert_of_block(b.block),
              .rows = count(v.tile_begin[b.block + 1] - v.tile_begin[b.block]),
              .cols = column_tiles(v, b.stage),
              .first = v.tile_begin[b.block]};
  }
}

/// Tasks in a block.
inline UNIEP_HD std::int64_t block_tasks(const PassView& v, QueueBlock b) {
  const BlockGrid grid = block_grid(v, b);
  if (b.stage == Stage::kDispatch) {
    return ceil_div(grid.rows, static_cast<std::uint32_t>(v.schedule.pull_tokens));
  }
  return std::int64_t{grid.rows} * grid.cols;
}

/// A tile's place in a grid of tiles.
struct GridTile {
  std::int64_t m, n;
};

/// A grid that is not as many bands long is walked as one: what it reads stays in cache all the
/// same, and tiles of all sources at a time push to all ranks at a time.
inline constexpr int kFewestBands = 3;

/// Tiles along the raster before the walk turns, of `along` that there are in that direction.
inline UNIEP_HD std::int64_t band_width(const Schedule& s, std::int64_t along) {
  const bool in_bands = s.band > 0 && along >= std::int64_t{kFewestBands} * s.band;
  return in_bands ? s.band : along;
}

/// Tile number `index` of the walk through a grid of `rows` by `cols` tiles. The walk goes along
/// the schedule's raster, and across it once per band; bands follow one another.
inline UNIEP_HD GridTile walk(const Schedule& s, std::uint32_t rows, std::uint32_t cols,
                              std::uint32_t index) {
  const bool along_m = s.raster == Raster::kAlongM;
  const std::uint32_t along = along_m ? rows : cols;
  const std::uint32_t across = along_m ? cols : rows;
  const auto band = static_cast<std::uint32_t>(band_width(s, along));
  const std::uint32_t first = index / (band * across) * band;  // of this band, along the raster
  const std::uint32_t width = min_of(band, along - first);     // the last band's may be less
  const std::uint32_t in_band = index - first * across;
  const std::uint32_t j = in_band / width;
  const std::uint32_t i = first + in_band - j * width;
  return along_m ? GridTile{i, j} : GridTile{j, i};
}

/// Task number `index` of a block that has this grid.
inline UNIEP_HD Task block_task(const PassView& v, Stage stage, const BlockGrid& grid,
                                std::uint32_t index) {
  Task task{.stage = stage, .expert = grid.expert};
  switch (stage) {
    case Stage::kDispatch: {
      const std::int64_t before = std::int64_t{index} * v.schedule.pull_tokens;
      task.m = task.tile = grid.first + before;
      task.n = min_of<std::int64_t>(v.schedule.pull_tokens, grid.rows - before);
      break;
    }
    case Stage::kReduce:
      task.m = task.tile = index;
      break;
    default: {
      const GridTile tile = walk(v.schedule, grid.rows, grid.cols, index);
      const bool wgrad = stage == Stage::kWgrad2 || stage == Stage::kWgrad1;
      task.m = grid.first + tile.m;
      task.n = tile.n;
      const std::int64_t row = wgrad ? std::int64_t{grid.expert} * grid.rows + tile.m : task.m;
      task.tile = row * grid.cols + task.n;
      break;
    }
  }
  return task;
}
inline UNIEP_HD Task block_task(const PassView& v, const QueueBlock& block, std::int64_t index) {
  return block_task(v, block.stage, block_grid(v, block), static_cast<std::uint32_t>(index));
}

/// Blocks of more tiles together are not mixed: either stage keeps all SMs busy for a while, with
/// operands that its own tiles share.
inline constexpr std::int64_t kMostMixedTiles = 1024;
/// Nor are more blocks, so that who walks through a queue need not look far ahead.
inline constexpr int kMostMixedBlocks = 8;

/// How many neighbours in the table, the block of `first` at a step and those of `second` there,
/// are mixed.
inline UNIEP_HD std::int16_t mixed_blocks(const PassView& v, const Track& first,
                                          const Track& second, int step) {
  if (!first.mixed || !second.mixed || first.blocks_in(step) != 1) return 0;
  const int own = first.first + first.blocks_before(step);
  const int begin = second.first + second.blocks_before(step);
  const int end = second.first + second.blocks_before(step + 1);
  const int count = 1 + end - begin;
  if (end == begin || count > kMostMixedBlocks) return 0;
  const std::int64_t tiles =
      (v.tile_begin[own + 1] - v.tile_begin[own]) * column_tiles(v, first.stage) +
      (v.tile_begin[end] - v.tile_begin[begin]) * column_tiles(v, second.stage);
  return static_cast<std::int16_t>(tiles <= kMostMixedTiles ? count : 0);
}

/// Block number `i` of a track.
inline UNIEP_HD QueueBlock queue_block(const PassView& v, const TrackList& queue, int track,
                                       int i) {
  const Track& t = queue.tracks[track];
  QueueBlock block{.stage = t.stage, .block = t.first + i};
  if (!t.mixed) return block;
  const int step = t.step_of(i);
  if (track + 1 < queue.count) {
    block.mix.blocks = mixed_blocks(v, t, queue.tracks[track + 1], step);
  }
  if (block.mix.blocks == 0 && track > 0) {
    block.mix.blocks = mixed_blocks(v, queue.tracks[track - 1], t, step);
    if (block.mix.blocks > 0) {
      block.mix.place = static_cast<std::int16_t>(1 + i - t.blocks_before(step));
    }
  }
  return block;
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

/// Deals out the tasks of blocks that are mixed, `own` of `all` being the first one's: these stand
/// in runs of `run`, each of which ends where their share of the positions up to there is whole.
/// Which task stands at position `at`, counted from the first block's first through all blocks.
inline UNIEP_HD std::uint32_t dealt_task(std::uint32_t own, std::uint32_t all, std::uint32_t run,
                                         std::uint32_t at) {
  std::uint32_t begun = 0;  // tasks of runs that have ended
  if (own > 0) {
    begun = mul_div(at, own, all) / run * run;
    const std::uint32_t end = min_of(begun + run, own);
    const std::uint32_t first = mul_div(end, all, own, own - 1) - (end - begun);  // of the next run
    if (at >= first) return begun + at - first;
  }
  return own + at - begun;
}

/// A queue of tasks as a table of its blocks and the number of tasks before each, as if none were
/// mixed: task i of the queue is found by binary search, with no list of tasks.
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

/// Where task `index` of a queue would stand if none were mixed, given the block of the table that
/// then would hold what stands there now: its mix, and its number `entry`. begin(i): tasks before
/// block i.
template <class Begin>
UNIEP_HD std::int64_t unmixed_index(const PassView& v, const QueueBlock::Mix& mix, Begin&& begin,
                                    int entry, std::int64_t index) {
  if (mix.blocks == 0) return index;
  const int head = entry - mix.place;
  const std::int64_t first = begin(head);
  return first + dealt_task(static_cast<std::uint32_t>(begin(head + 1) - first),
                            static_cast<std::uint32_t>(begin(head + mix.blocks) - first),
                            static_cast<std::uint32_t>(v.schedule.mix_run),
                            static_cast<std::uint32_t>(index - first));
}

/// Task `index` of a queue, given the block of the table that would hold it if none were mixed.
inline UNIEP_HD Task task_at(const PassView& v, const QueueView& q, int entry, std::int64_t index) {
  const QueueBlock::Mix mix = q.blocks[entry].mix;
  const auto begin = [&](int i) { return q.begin[i]; };
  const std::int64_t at = unmixed_index(v, mix, begin, entry, index);
  entry -= mix.place;
  while (q.begin[entry + 1] <= at) ++entry;
  return block_task(v, q.blocks[entry], at - q.begin[entry]);
}

/// Task `index` of the queue, 0 <= index < size().
inline UNIEP_HD Task queue_task(const PassView& v, const QueueView& q, std::int64_t index) {
  return task_at(v, q, q.find(index), index);
}

}  // namespace uniep
