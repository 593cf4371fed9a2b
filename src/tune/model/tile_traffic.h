#pragma once

#include <vector>

#include "schedule/block_tasks.h"
#include "tune/model/product_size.h"

namespace uniep::tune {

/// Bytes of memory behind the tiles of products. What tiles read comes from memory once for all
/// that need it at a time: for those at work side by side in the order of the walk; for the whole
/// grid where the operand fits half of the cache (the other half is for what it is used with).
class TileTraffic {
 public:
  /// The traffic of `workers` at work side by side; a cache of 0 bytes holds everything.
  TileTraffic(const PassView& view, int workers, double cache_bytes);

  /// What is read for the task, its share of what others read with it; and of a weight gradient
  /// what is written.
  double bytes(const PassView& v, const Task& task, const ProductSize& size) const;

 private:
  std::int64_t row_tiles(const PassView& v, const Task& task, const StageGrid& grid) const;

  int workers_;
  double cache_bytes_;
  std::vector<int> block_tiles_;  // of each tile of rows: those of its block
};

}  // namespace uniep::tune
