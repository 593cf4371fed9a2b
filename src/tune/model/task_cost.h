#pragma once

#include "schedule/block_tasks.h"
#include "tune/model/machine_profile.h"
#include "tune/model/product_size.h"
#include "tune/model/tile_traffic.h"

namespace uniep::tune {

/// What the cost of a task that moves data or adds it up depends on: see MoveCost.
struct MoveSize {
  std::int64_t items = 0;
  std::int64_t bytes = 0;
};
MoveSize move_size(const PassView& v, const Task& task);

/// Seconds of one worker for each task of a pass under a schedule, without waits and transfers.
class TaskCosts {
 public:
  /// The costs for workers of which `workers` compute side by side.
  TaskCosts(const MachineProfile& profile, const PassView& view, int workers);

  double of(const PassView& v, const Task& task) const;

 private:
  /// Seconds of a product's task: of the multiplications or, if that is longer, of memory. Small
  /// batches multiply less than the weights that they read take to come, and so does a walk that
  /// reads them again and again.
  double product(const PassView& v, const Task& task) const;
  /// Rows or columns of a tile, those that it lacks at the price of padding.
  double padded(std::int64_t real, std::int64_t whole) const;

  const MachineProfile& profile_;
  const TileTraffic traffic_;
  const double share_of_plain_;  ///< how much longer products take than those of plain experts
  const GemmCost* by_stage_[kMaxStages] = {};
};

/// Bytes of a token as ranks pull it.
inline std::int64_t token_bytes(const PassView& v, Stage stage) {
  return v.stage(stage).wire.pulled_token;
}
/// The bytes of so many tokens, as the pass publishes them.
inline std::int64_t published_bytes(const PassView& v, std::int64_t tokens) {
  std::int64_t bytes = 0;
  for (const StageView& stage : v.stages) bytes += tokens * stage.wire.pulled_token;
  return bytes;
}

}  // namespace uniep::tune
