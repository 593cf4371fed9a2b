#pragma once

#include "schedule/queue.h"
#include "tune/machine_profile.h"

namespace uniep::tune {

/// What a product's cost depends on.
struct ProductSize {
  std::int64_t m = 0;
  std::int64_t n = 0;  // both halves of an fc1 tile
  std::int64_t k = 0;
};
bool is_product(Stage stage);
ProductSize product_size(const PassView& v, const Task& task);

/// Bytes of memory that a tile of a product reads or writes and shares with no tile beside it: of a
/// tile of rows its weights, which the row tiles of its expert read at the same time; of a weight
/// gradient what it writes.
double unshared_bytes(const PassView& v, const Task& task);

/// What the cost of a dispatch or reduce task depends on: see MoveCost.
struct MoveSize {
  std::int64_t items = 0;
  std::int64_t bytes = 0;
};
MoveSize move_size(const PassView& v, const Task& task);

/// Seconds of one worker for each task of a pass under a schedule, without waits and transfers.
class TaskCosts {
 public:
  TaskCosts(const MachineProfile& profile, const PassView& view);

  double of(const PassView& v, const Task& task) const;

 private:
  /// As long as the multiplications take or, where that is longer, as memory takes: small batches
  /// multiply less than the weights that they read take to come.
  double product(const PassView& v, const Task& task) const;
  /// Rows or columns of a tile, those that it lacks at the price of padding.
  double padded(std::int64_t real, std::int64_t whole) const;

  const MachineProfile& profile_;
  const GemmCost* by_stage_[kNumStages] = {};
};

/// Bytes of a copy of a token, or of its results.
inline std::int64_t row_bytes(const PassView& v) { return 2 * v.hidden; }

}  // namespace uniep::tune
