#include "tune/task_cost.h"

#include <algorithm>

#include "base/check.h"

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

/// What a byte costs with so many tasks at a time, as a share of `per_byte`.
double share_of_rate(const MoveCost& cost, double tasks) {
  return cost.crowd > 0 ? std::clamp(tasks / cost.crowd, cost.alone, 1.0) : 1.0;
}

double move_cost(const MoveCost& cost, const MoveSize& size, double tasks) {
  return cost.fixed + cost.per_item * static_cast<double>(size.items) +
         share_of_rate(cost, tasks) * cost.per_byte * static_cast<double>(size.bytes);
}

/// Tasks of a whole pass: where they are fewer than a crowd, all of them run at a time.
double dispatch_tasks(const PassView& v) {
  return static_cast<double>(v.pull_begin[v.num_blocks()]) / v.schedule.pull_tokens;
}

}  // namespace

MoveSize move_size(const PassView& v, const Task& task) {
  if (task.stage == Stage::kReduce) {
    const std::int64_t first = task.m * v.schedule.token_block;
    const std::int64_t tokens = min_of<std::int64_t>(v.schedule.token_block, v.tokens - first);
    return {tokens, tokens * (v.topk + 1) * row_bytes(v)};
  }
  std::int64_t rows = 0;
  for (std::int64_t i = task.m; i < task.m + task.n; ++i) rows += v.pulls[i].num_rows;
  return {task.n, rows * row_bytes(v)};
}

TaskCosts::TaskCosts(const MachineProfile& profile, const PassView& view, int workers)
    : profile_(profile), traffic_(view, workers, profile.cache_bytes) {
  for (int i = 0; i < kNumStages; ++i) {
    const auto stage = static_cast<Stage>(i);
    if (!is_product(stage)) continue;
    by_stage_[i] = find_cost(profile, stage, view.schedule.tile_n);
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
  return std::max({multiplying, moving, profile_.draw_s});
}

double TaskCosts::of(const PassView& v, const Task& task) const {
  switch (task.stage) {
    case Stage::kDispatch:
      return move_cost(profile_.dispatch, move_size(v, task), dispatch_tasks(v));
    case Stage::kReduce:
      return move_cost(profile_.reduce, move_size(v, task),
                       static_cast<double>(v.num_token_blocks()));
    default:
      return product(v, task);
  }
}

}  // namespace uniep::tune
