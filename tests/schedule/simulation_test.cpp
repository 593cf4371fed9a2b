// Every pass completes for any number of workers, and no task runs before what it reads has been
// written, which is tracked apart from the counters.
#include <gtest/gtest.h>

#include <map>
#include <set>

#include "schedule/interleaving.h"

namespace uniep::testing {
namespace {

/// What has been written, by meaning. Every question is put when a task starts.
class Data {
 public:
  explicit Data(const RandomPass& p) : p_(p) {}

  void publish(int rank) { published_.insert(rank); }

  bool inputs_written(const PassView& v, const Task& t) {
    switch (t.stage) {
      case Stage::kDispatch:
      case Stage::kRedispatch:
        for (std::int64_t i = t.m; i < t.m + t.n; ++i) {
          if (!published_.contains(v.pulls[i].source)) return false;
        }
        return true;
      case Stage::kExpand:
        return true;  // of what forward left
      case Stage::kFc1:
        return are_written(rows_, v, v.tiles[t.m]);
      case Stage::kRefc1:
        return x_is_there(v, v.tiles[t.m]);
      case Stage::kDfc2:
        return are_written(rows_, v, v.tiles[t.m]) && h_is_there(v, v.tiles[t.m]);
      case Stage::kFc2:
      case Stage::kDfc1:
        return computed_[{v.rank, v.tiles[t.m].first_row}] == columns_of_first_gemm(v);
      case Stage::kWgrad2:
      case Stage::kWgrad1:
        if (!v.moves_data()) return true;  // the part before this one has come to its end
        for (const Tile& tile : plan(v).tiles(v.schedule.tile_m)) {
          if (tile.expert != t.expert) continue;
          if (computed_[{v.rank, tile.first_row}] != columns_of_first_gemm(v)) return false;
          if (t.stage == Stage::kWgrad1 && !x_is_there(v, tile)) return false;
        }
        return true;
      default:
        return rows_came_back(v, t);
    }
  }

  void run(const PassView& v, const Task& t) {
    if (v.stage(t.stage).grid == TileGrid::kPulls) {
      for (std::int64_t i = t.m; i < t.m + t.n; ++i) {
        for (int c = 0; c < v.pulls[i].num_rows; ++c) {
          (t.stage == Stage::kDispatch ? rows_ : x_rows_)
              .insert({v.rank, v.pull_rows[v.pulls[i].first_row + c]});
        }
      }
    } else if (t.stage == Stage::kRefc1) {
      ++h_[{v.rank, v.tiles[t.m].first_row}];
    } else if (t.stage == first_product(v)) {
      ++computed_[{v.rank, v.tiles[t.m].first_row}];
    } else if (t.stage == second_product(v)) {
      const Tile& tile = v.tiles[t.m];
      const std::int64_t cols =
          min_of<std::int64_t>(v.schedule.tile_n, v.hidden - t.n * v.schedule.tile_n);
      for (int i = 0; i < tile.rows; ++i) {
        const RowOrigin& o = v.row_origin[tile.first_row + i];
        pushed_[{o.source, std::int64_t{o.token} * v.topk + o.slot}] += cols;
      }
    }
  }

 private:
  const RoutingPlan& plan(const PassView& v) const {
    return p_.plans[static_cast<std::size_t>(v.rank)];
  }

  static std::int64_t columns_of_first_gemm(const PassView& v) {
    const std::int64_t n = v.pass == Pass::kForward ? v.schedule.tile_n / 2 : v.schedule.tile_n;
    return ceil_div(v.intermediate, n);
  }

  using Rows = std::set<std::pair<int, std::int64_t>>;

  static bool are_written(const Rows& rows, const PassView& v, const Tile& tile) {
    for (int i = 0; i < tile.rows; ++i) {
      if (!rows.contains({v.rank, tile.first_row + i})) return false;
    }
    return true;
  }
  /// Of backward: forward may have left both.
  bool x_is_there(const PassView& v, const Tile& tile) const {
    return p_.routing.problem.save == Save::kRows || are_written(x_rows_, v, tile);
  }
  bool h_is_there(const PassView& v, const Tile& tile) {
    const std::int64_t columns = ceil_div(v.intermediate, std::int64_t{v.schedule.tile_n / 2});
    return !p_.routing.problem.recompute_h || h_[{v.rank, tile.first_row}] == columns;
  }

  bool rows_came_back(const PassView& v, const Task& t) {
    const std::int64_t first = t.m * v.schedule.token_block * v.topk;
    const std::int64_t end =
        min_of<std::int64_t>(first + v.schedule.token_block * v.topk, v.tokens * v.topk);
    for (std::int64_t slot = first; slot < end; ++slot) {
      if (v.topk_ids[slot] >= 0 && pushed_[{v.rank, slot}] != v.hidden) return false;
    }
    return true;
  }

  const RandomPass& p_;
  std::set<int> published_;
  Rows rows_;
  Rows x_rows_;                                                    // made again
  std::map<std::pair<int, std::int64_t>, std::int64_t> h_;         // column tiles made again
  std::map<std::pair<int, std::int64_t>, std::int64_t> computed_;  // column tiles, by first row
  std::map<std::pair<int, std::int64_t>, std::int64_t> pushed_;    // columns, by slot
};

TEST(Simulation, EveryScheduleCompletesInAnyOrderWithAnyNumberOfWorkers) {
  const int count = cases(2500);
  for (unsigned seed = 1; seed <= static_cast<unsigned>(count); ++seed) {
    RandomPass p = random_pass(seed, 40);
    p.routing.problem.save = kSaves[seed % std::size(kSaves)];
    p.routing.problem.recompute_h = seed % 5 >= 2;
    build_orders(p);
    for (const int workers : {1, 2, static_cast<int>(3 + seed % 4)}) {
      SCOPED_TRACE(cat(describe(seed, p), "\n  simulated workers ", workers));
      Data data(p);
      Interleaving(p, data, workers, seed).run();
      if (HasFatalFailure()) return;
    }
  }
}

}  // namespace
}  // namespace uniep::testing
