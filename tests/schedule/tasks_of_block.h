#pragma once

#include <vector>

#include "schedule/block_tasks.h"

namespace uniep::testing {

/// All tasks of a block, in the order of its walk.
inline std::vector<Task> tasks_of_block(const PassView& v, Stage stage, int block) {
  const BlockGrid grid = block_grid(v, stage, block);
  std::vector<Task> tasks(grid_tasks(v, stage, grid));
  for (std::uint32_t i = 0; i < tasks.size(); ++i) tasks[i] = block_task(v, stage, grid, i);
  return tasks;
}

}  // namespace uniep::testing
