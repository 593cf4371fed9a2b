#include "tune/model/pushed_tiles.h"

namespace uniep::tune {

namespace {

/// The stage that pushes; kPlan: none does.
Stage pushing_stage(const PassView& v) {
  for (int i = 0; i < v.num_stages; ++i) {
    if (v.stage(v.stage_at(i)).side == StageSide::kPush) return v.stage_at(i);
  }
  return Stage::kPlan;
}

}  // namespace

PushedTiles::PushedTiles(const PassView& v)
    : stage_(pushing_stage(v)), grid_(stage_grid(v, stage_)) {
  const std::int64_t tiles = stage_ == Stage::kPlan ? 0 : v.tile_begin[v.num_blocks()];
  left_.assign(static_cast<std::size_t>(tiles), column_tiles(v, stage_));
  run_begin_.reserve(static_cast<std::size_t>(tiles) + 1);
  run_begin_.push_back(0);
  for (std::int64_t tile = 0; tile < tiles; ++tile) {
    add(v, tile);
    run_begin_.push_back(runs_.size());
  }
}

void PushedTiles::add(const PassView& v, std::int64_t tile) {
  const Task first_column{.stage = stage_, .m = tile};
  const auto share = static_cast<std::uint32_t>(columns(0));
  for_each_signal(v, first_column, [&](const Signal& s) {
    const std::uint32_t rows = s.amount / share;
    const auto arrivals = static_cast<std::int64_t>(arrivals_.size());
    const bool begins = runs_.size() == run_begin_.back() || runs_.back().rank != s.rank;
    if (begins) runs_.push_back({.rank = s.rank, .first_arrival = arrivals});
    Run& run = runs_.back();
    run.rows += rows;
    run.end_arrival = arrivals + 1;
    arrivals_.push_back({s.index, rows * static_cast<std::uint32_t>(grid_.cols), s.kind});
  });
}

}  // namespace uniep::tune
