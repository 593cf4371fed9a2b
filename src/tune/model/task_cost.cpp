#include "tune/model/task_cost.h"

#include <algorithm>

#include "base/check.h"
#include "base/plain_experts.h"
#include "schedule/dependencies.h"
#include "uniep/bf16.h"

namespace uniep::tune {
namespace {

const GemmCost* find_cost(const MachineProfile& profile, Stage stage, int tile_n) {
  const GemmCost* found = nullptr;
  for (const GemmCost& cost : profile.gemms) {
    if (cost.stage != stage) continue;
    if (cost.tile_n == tile_n) return &cost;
    if (cost.tile_n == 0) found = &cost;
  }
  return found;
}

/// Time of a pass whose experts are not plain over that of the same pass of plain ones, of which
/// profiles are. Products make up nearly all of it. Means over five models on one H100, 2026-11-25
/// (benchmarks/results/2026-11-25_1xH100_arithmetic.json). With a bias, of `swiglu,bias` and
/// `gpt_oss,after,bias`; without, of `swiglu,after` and `gpt_oss`.
double share_of_plain_experts(const PassView& v) {
  if (are_plain_experts(v.activation, v.probs, v.choice.has_bias,
                        v.group_experts > 0 || v.slot_rows))
    return 1;
  if (v.pass == Pass::kForward) return v.choice.has_bias ? 1.017 : 1.002;
  return v.choice.has_bias ? 1.088 : 1.017;
}

/// What a byte costs with so many tasks at a time, as a share of `per_byte`.
double share_of_rate(const MoveCost& cost, double tasks) {
  return cost.crowd > 0 ? std::clamp(tasks / cost.crowd, cost.alone, 1.0) : 1.0;
}

double move_cost(const MoveCost& cost, const MoveSize& size, double tasks) {
  return cost.fixed + cost.per_item * static_cast<double>(size.items) +
         share_of_rate(cost, tasks) * cost.per_byte * static_cast<double>(size.bytes);
}

/// Tasks of a stage in the whole pass: if they are fewer than a crowd, all of them run at a time.
double tasks_of(const PassView& v, const StageView& stage) {
  switch (stage.grid) {
    case TileGrid::kPulls:
      return static_cast<double>(v.pull_begin[v.num_blocks()]) / v.schedule.pull_tokens;
    case TileGrid::kRowTiles:
      return static_cast<double>(v.tile_begin[v.num_blocks()]) * stage.column_tiles;
    case TileGrid::kTokenBlocks:
      return static_cast<double>(v.num_token_blocks());
    case TileGrid::kCrossings:
    case TileGrid::kReturns: {
      const int pieces = v.layout.hosts * v.num_pieces();
      const std::int64_t* begin =
          stage.grid == TileGrid::kCrossings ? v.across->sent_begin : v.across->returned_begin;
      return static_cast<double>(begin[pieces]) / v.schedule.token_block;
    }
    case TileGrid::kWeightTiles:
    case TileGrid::kNone:
      break;
  }
  return 0;
}

/// Tokens that a task sends to another host.
MoveSize crossing_size(const PassView& v, const Task& task) {
  const auto [begin, end] = host_items(v, task);
  const std::int64_t tokens = end - begin;
  std::int64_t bytes = 0;
  for (const StageView& stage : v.stages) bytes += tokens * stage.wire.pulled_token;
  return {tokens, bytes};
}

/// Rows or sums that a task sends back.
MoveSize return_size(const PassView& v, const Task& task) {
  const auto [begin, end] = host_items(v, task);
  const bool fp32 = v.choice.sums_cross && v.choice.fp32_sums;
  const auto element = static_cast<std::int64_t>(fp32 ? sizeof(float) : sizeof(bf16));
  return {end - begin, (end - begin) * v.hidden * element};
}

}  // namespace

MoveSize move_size(const PassView& v, const Task& task) {
  const StageView& stage = v.stage(task.stage);
  switch (stage.grid) {
    case TileGrid::kPulls: {
      std::int64_t rows = 0;
      for (std::int64_t i = task.first_pull(); i < task.end_pull(); ++i)
        rows += v.pulls[i].num_rows;
      const std::int64_t pulls = task.end_pull() - task.first_pull();
      return {pulls, rows * stage.unit_bytes + pulls * stage.pull_bytes};
    }
    case TileGrid::kRowTiles: {
      const std::int64_t rows = v.tiles[task.m].rows;
      const std::int64_t cols = column_tile(stage_grid(v, task.stage), task.n).count;
      return {rows, rows * stage.unit_bytes * cols / stage.cols};
    }
    case TileGrid::kTokenBlocks: {
      const std::int64_t first = task.m * v.schedule.token_block;
      const std::int64_t tokens = min_of<std::int64_t>(v.schedule.token_block, v.tokens - first);
      return {tokens, tokens * stage.unit_bytes};
    }
    case TileGrid::kCrossings:
      return crossing_size(v, task);
    case TileGrid::kReturns:
      return return_size(v, task);
    case TileGrid::kWeightTiles:
    case TileGrid::kNone:
      break;
  }
  ensure(false, "stage ", static_cast<int>(task.stage), " moves nothing");
  return {};
}

TaskCosts::TaskCosts(const MachineProfile& profile, const PassView& view, int workers)
    : profile_(profile),
      traffic_(view, workers, profile.cache_bytes),
      share_of_plain_(profile.backend == Backend::kCuda ? share_of_plain_experts(view) : 1) {
  for (int i = 0; i < kMaxStages; ++i) {
    const auto stage = static_cast<Stage>(i);
    if (view.stage(stage).kind != StageKind::kProduct) continue;
    by_stage_[i] = find_cost(profile, view.stage(stage).like, view.schedule.tile_n);
    require(by_stage_[i] != nullptr, ErrorCode::kUnsupported, "profile ", profile.name,
            " has no cost of stage ", name(stage), " with tile_n=", view.schedule.tile_n,
            "; a profile that has one is accepted");
  }
}

double TaskCosts::padded(std::int64_t real, std::int64_t whole) const {
  return static_cast<double>(real) + profile_.padding * static_cast<double>(whole - real);
}

double TaskCosts::product(const PassView& v, const Task& task) const {
  const GemmCost& cost = *by_stage_[static_cast<int>(task.stage)];
  const ProductSize size = product_size(v, task);
  const double m = padded(size.m, v.schedule.tile_m);
  const double n = padded(size.n, v.schedule.tile_n);
  const auto k = static_cast<double>(round_up<std::int64_t>(size.k, profile_.k_step));
  const double multiplying = cost.fixed + cost.per_mnk * m * n * k + cost.per_mk * m * k +
                             cost.per_nk * n * k + cost.per_mn * m * n;
  // What a worker has of the memory's bandwidth while all use it, reduce shows.
  const double moving = profile_.reduce.per_byte * traffic_.bytes(v, task, size);
  return share_of_plain_ * std::max({multiplying, moving, profile_.draw_s});
}

double TaskCosts::of(const PassView& v, const Task& task) const {
  const StageView& stage = v.stage(task.stage);
  // Communication all of it, adding up included, which takes no longer than copying.
  if (stage.side == StageSide::kRail) {
    return move_cost(profile_.dispatch, move_size(v, task), tasks_of(v, stage));
  }
  switch (stage.kind) {
    case StageKind::kMove:
      return move_cost(profile_.dispatch, move_size(v, task), tasks_of(v, stage));
    case StageKind::kSum:
      return move_cost(profile_.reduce, move_size(v, task), tasks_of(v, stage));
    case StageKind::kProduct:
      return product(v, task);
  }
  return 0;
}

}  // namespace uniep::tune
