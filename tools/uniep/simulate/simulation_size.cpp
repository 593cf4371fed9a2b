#include "simulate/simulation_size.h"

#include "base/check.h"
#include "common/table.h"
#include "schedule/pass_stages.h"

namespace uniep::tool {
namespace {

// On one core of an AMD EPYC VM (2026-11-24) a copy took 0.5 us and 50 bytes, a task 0.3 us: these
// are 17 s with 1.6 GB, and 10 s.
constexpr double kMostCopies = 1 << 25;
constexpr double kMostTasks = 1 << 25;

/// Copies of tokens that experts receive, on all ranks: what routing and its plans grow with.
double copies_of(const workload::ShapeSpec& spec, int ranks) {
  const int slots = spec.topk + spec.shared_experts;
  return static_cast<double>(ranks) * static_cast<double>(spec.tokens) * slots;
}

/// Tiles that a product cuts so many tiles of rows, and gradients of so many experts' weights,
/// into.
double tiles_of(const StageView& stage, const Schedule& schedule, double heights, double experts) {
  if (stage.grid == TileGrid::kRowTiles) return heights * stage.column_tiles;
  if (stage.grid != TileGrid::kWeightTiles) return 0;
  return experts * ceil_div(stage.rows, schedule.tile_m) * stage.column_tiles;
}

/// Tile tasks of both passes on the ranks that are simulated, of a balanced load.
double tasks_of(const workload::ShapeSpec& spec, int ranks, const Schedule& schedule,
                int simulated) {
  const double share = static_cast<double>(simulated) / ranks;
  const double experts = (spec.num_experts + spec.shared_experts * ranks) * share;
  const double heights = copies_of(spec, ranks) * share / schedule.tile_m + experts;
  double tasks = 0;
  for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
    PassView sizes;
    sizes.pass = pass;
    sizes.schedule = schedule;
    sizes.topk = spec.topk;
    sizes.hidden = spec.hidden;
    sizes.intermediate = spec.intermediate;
    sizes.activation = spec.activation;
    sizes.choice.has_bias = spec.bias;
    set_stages(sizes);
    for (const StageView& stage : sizes.stages) {
      tasks += tiles_of(stage, schedule, heights, experts);
    }
  }
  return tasks;
}

}  // namespace

void require_simulable(const workload::ShapeSpec& spec, int ranks, const Schedule& schedule,
                       int simulated) {
  const auto refuse_above = [&](double most, double count, const char* what) {
    require(count <= most, ErrorCode::kCapacity, "--shape ", workload::to_string(spec), " at ",
            counted(ranks, "rank", "ranks"), " has some ", formatted("%.3g", count), ' ', what,
            "; at most ", static_cast<std::int64_t>(most),
            " are simulated, so a smaller shape or fewer --ranks are accepted");
  };
  refuse_above(kMostCopies, copies_of(spec, ranks), "copies of tokens (ranks x tokens x topk)");
  refuse_above(kMostTasks, tasks_of(spec, ranks, schedule, simulated), "tile tasks");
}

}  // namespace uniep::tool
