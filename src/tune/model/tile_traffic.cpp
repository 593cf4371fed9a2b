#include "tune/model/tile_traffic.h"

#include <algorithm>

namespace uniep::tune {
namespace {

/// Rows and columns of tiles that `workers` are at at a time.
GridTile side_by_side(const Schedule& s, std::int64_t rows, std::int64_t cols,
                      std::int64_t workers) {
  const bool along_m = s.raster == Raster::kAlongM;
  const std::int64_t width = band_width(s, along_m ? rows : cols);
  const std::int64_t along = std::min(width, workers);
  const std::int64_t across = std::clamp<std::int64_t>(workers / width, 1, along_m ? cols : rows);
  return along_m ? GridTile{along, across} : GridTile{across, along};
}

}  // namespace

TileTraffic::TileTraffic(const PassView& view, int workers, double cache_bytes)
    : workers_(workers), cache_bytes_(cache_bytes) {
  const int blocks = view.num_blocks();
  block_tiles_.resize(static_cast<std::size_t>(view.tile_begin[blocks]));
  for (int block = 0; block < blocks; ++block) {
    const std::int64_t begin = view.tile_begin[block], end = view.tile_begin[block + 1];
    std::fill(block_tiles_.begin() + begin, block_tiles_.begin() + end,
              static_cast<int>(end - begin));
  }
}

std::int64_t TileTraffic::row_tiles(const PassView& v, const Task& task,
                                    const StageGrid& grid) const {
  return grid.rows > 0 ? ceil_div<std::int64_t>(grid.rows, v.schedule.tile_m)
                       : block_tiles_[static_cast<std::size_t>(task.m)];
}

double TileTraffic::bytes(const PassView& v, const Task& task, const ProductSize& size) const {
  const StageGrid grid = stage_grid(v, task.stage);
  const std::int64_t rows = row_tiles(v, task, grid);
  const std::int64_t cols = column_tiles(v, task.stage);
  const GridTile shared = side_by_side(v.schedule, rows, cols, workers_);
  // A strip is what a row, or a column, of tiles reads; `strips` of them are an operand.
  const auto& [left, right, out] = v.stage(task.stage).element_bytes;
  const auto each = [&](int element, std::int64_t width, std::int64_t strips,
                        std::int64_t at_a_time, std::int64_t all) {
    const double strip = element * static_cast<double>(width * size.k);
    const bool stays = cache_bytes_ == 0 || strip * static_cast<double>(strips) <= cache_bytes_ / 2;
    return strip / static_cast<double>(stays ? all : at_a_time);
  };
  const double written = grid.rows > 0 ? out * static_cast<double>(size.m * size.n) : 0;
  return written + each(left, size.m, rows, shared.n, cols) +
         each(right, size.n, cols, shared.m, rows);
}

}  // namespace uniep::tune
