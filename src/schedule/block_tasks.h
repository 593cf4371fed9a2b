#pragma once

#include "schedule/pass_view.h"

namespace uniep {

/// One tile task.
struct Task {
  Stage stage = Stage::kDispatch;
  int expert = -1;        // local expert, or -1
  std::int64_t tile = 0;  // index within the stage, for reports
  // dispatch: first pull; GEMM: tile; reduce: token block; wgrad: row tile; send, relay: HostPart
  std::int64_t m = 0;
  std::int64_t n = 0;  // dispatch: pulls; GEMM, wgrad: column tile; send, relay: host

  // Of dispatch and redispatch: pulls [first_pull(), end_pull()).
  UNIEP_HD std::int64_t first_pull() const { return m; }
  UNIEP_HD std::int64_t end_pull() const { return m + n; }
  // Of send and relay.
  UNIEP_HD int host() const { return static_cast<int>(n); }
};

/// What the tasks of a block have in common: the grid that they are the tiles of. Fewer than 2^32
/// tasks, so that a GPU, which has no division of 64 bits, finds one in few steps.
struct BlockGrid {
  int expert = -1;         // local expert, or -1
  std::uint32_t rows = 0;  // tiles; dispatch: pulls; reduce: token blocks
  std::uint32_t cols = 1;
  std::int64_t first = 0;  // tile of rows, or pull; wgrad: 0, since rows are the gradient's
};

/// Tokens or rows [begin, end) of HostTables: sent_tokens or returned.
struct HostItems {
  std::int64_t begin = 0, end = 0;
};

/// What of a piece crosses to one host.
inline UNIEP_HD HostItems items_of_piece(const PassView& v, TileGrid grid, int host, int piece) {
  const HostTables& t = *v.across;
  const std::int64_t* begin = grid == TileGrid::kCrossings ? t.sent_begin : t.returned_begin;
  begin += std::int64_t{host} * v.num_pieces() + piece;
  return {begin[0], begin[1]};
}

/// Tasks of a piece, which is cut by `token_block` tokens or rows.
inline UNIEP_HD std::uint32_t parts_of_piece(const PassView& v, TileGrid grid, int host,
                                             int piece) {
  const auto [begin, end] = items_of_piece(v, grid, host, piece);
  return static_cast<std::uint32_t>(ceil_div<std::int64_t>(end - begin, v.schedule.token_block));
}

/// Number `i` of the other hosts, from the next one on, so that not all ranks begin with the same.
inline UNIEP_HD int other_host(const PassView& v, int i) {
  return (v.layout.host_of(v.rank) + 1 + i) % v.layout.hosts;
}

/// The grid of a block whose tasks are for other hosts.
inline UNIEP_HD BlockGrid host_grid(const PassView& v, TileGrid grid, int block) {
  BlockGrid all{.first = block};
  for (int i = 0; i + 1 < v.layout.hosts; ++i) {
    all.rows += parts_of_piece(v, grid, other_host(v, i), block);
  }
  return all;
}

inline UNIEP_HD BlockGrid block_grid(const PassView& v, Stage of, int block) {
  const auto count = [](std::int64_t n) { return static_cast<std::uint32_t>(n); };
  const StageView& stage = v.stage(of);
  switch (stage.grid) {
    case TileGrid::kPulls:
      return {.expert = v.expert_of_block(block),
              .rows = count(v.pull_begin[block + 1] - v.pull_begin[block]),
              .first = v.pull_begin[block]};
    case TileGrid::kRowTiles:
      return {.expert = v.expert_of_block(block),
              .rows = count(v.tile_begin[block + 1] - v.tile_begin[block]),
              .cols = stage.column_tiles,
              .first = v.tile_begin[block]};
    case TileGrid::kWeightTiles:
      return {.expert = v.expert_order[block],
              .rows = ceil_div(count(stage.rows), count(v.schedule.tile_m)),
              .cols = stage.column_tiles};
    case TileGrid::kTokenBlocks:
      return {.rows = count(v.reduced[block].count), .first = v.reduced[block].first};
    case TileGrid::kCrossings:
    case TileGrid::kReturns:
      if constexpr (kMayHaveHosts) return host_grid(v, stage.grid, block);
      break;
    case TileGrid::kNone:
      break;
  }
  return {};
}

/// What a task for another host takes there: part number `part` of a piece.
struct HostPart {
  int piece = 0;
  std::uint32_t part = 0;

  UNIEP_HD std::int64_t packed() const { return std::int64_t{piece} << 32 | part; }
};
inline UNIEP_HD HostPart host_part(const Task& task) {
  return {static_cast<int>(task.m >> 32), static_cast<std::uint32_t>(task.m)};
}
inline UNIEP_HD HostItems host_items(const PassView& v, const Task& task) {
  const auto [piece, part] = host_part(task);
  HostItems items = items_of_piece(v, v.stage(task.stage).grid, task.host(), piece);
  items.begin += std::int64_t{part} * v.schedule.token_block;
  items.end = min_of<std::int64_t>(items.end, items.begin + v.schedule.token_block);
  return items;
}

/// Task number `index` of a block whose tasks are for one other host each.
inline UNIEP_HD Task host_task(const PassView& v, Stage stage, const BlockGrid& grid,
                               std::uint32_t index) {
  Task task{.stage = stage};
  const auto piece = static_cast<int>(grid.first);
  for (int i = 0;; ++i) {
    const int host = other_host(v, i);
    const std::uint32_t parts = parts_of_piece(v, v.stage(stage).grid, host, piece);
    task.m = HostPart{piece, index}.packed();
    task.n = host;
    if (index < parts) break;
    index -= parts;
  }
  task.tile = host_items(v, task).begin;
  return task;
}

/// Tasks in a block that has this grid.
inline UNIEP_HD std::uint32_t grid_tasks(const PassView& v, Stage stage, const BlockGrid& grid) {
  if (v.stage(stage).grid == TileGrid::kPulls) {
    return ceil_div(grid.rows, static_cast<std::uint32_t>(v.schedule.pull_tokens));
  }
  return grid.rows * grid.cols;
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
  const TileGrid kind = v.stage(stage).grid;
  switch (kind) {
    case TileGrid::kPulls: {
      const std::int64_t before = std::int64_t{index} * v.schedule.pull_tokens;
      task.m = task.tile = grid.first + before;
      task.n = min_of<std::int64_t>(v.schedule.pull_tokens, grid.rows - before);
      break;
    }
    case TileGrid::kTokenBlocks:
    case TileGrid::kRowTiles:
    case TileGrid::kWeightTiles: {
      const GridTile tile = walk(v.schedule, grid.rows, grid.cols, index);
      task.m = grid.first + tile.m;
      task.n = tile.n;
      const bool of_weights = kind == TileGrid::kWeightTiles;
      const std::int64_t row = of_weights ? std::int64_t{grid.expert} * grid.rows + tile.m : task.m;
      task.tile = row * grid.cols + task.n;
      break;
    }
    case TileGrid::kCrossings:
    case TileGrid::kReturns:
      if constexpr (kMayHaveHosts) return host_task(v, stage, grid, index);
      break;
    case TileGrid::kNone:
      break;
  }
  return task;
}

}  // namespace uniep
