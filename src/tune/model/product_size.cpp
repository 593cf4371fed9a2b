#include "tune/model/product_size.h"

#include "graph/layer_graph.h"

namespace uniep::tune {

bool is_product(Stage stage) {
  return stage != Stage::kPlan && row_of(stage).kind == StageKind::kProduct;
}

ProductSize product_size(const PassView& v, const Task& task) {
  const StageGrid grid = stage_grid(v, task.stage);
  const std::int64_t cols = column_tile(grid, task.n).count;
  const std::int64_t halves = v.stage(task.stage).halves;
  if (grid.rows == 0) return {v.tiles[task.m].rows, halves * cols, grid.reduction};
  const std::int64_t tile_m = v.schedule.tile_m;
  return {min_of<std::int64_t>(tile_m, grid.rows - task.m * tile_m), cols,
          v.tokens_per_expert[task.expert]};
}

}  // namespace uniep::tune
