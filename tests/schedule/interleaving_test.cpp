// Every pass completes for any number of workers, and no task runs before what it reads has been
// written, which is tracked apart from the counters.
#include "schedule/interleaving.h"

#include <gtest/gtest.h>

#include <map>
#include <set>

#include "support/ring_rows.h"

namespace uniep::testing {
namespace {

/// What has been written, by meaning. Every question is put when a task starts.
class Data {
 public:
  explicit Data(const RandomPass& p) : p_(p) {}

  void publish(int rank) { published_.insert(rank); }

  bool inputs_written(const PassView& v, const Task& t) {
    return has_room(v, t) && inputs_are_there(v, t);
  }

  void run(const PassView& v, const Task& t) {
    count_reader(v, t);
    write(v, t);
  }

 private:
  bool inputs_are_there(const PassView& v, const Task& t) {
    switch (t.stage) {
      case Stage::kSend:
        return published_.contains(v.rank);
      case Stage::kDispatch:
      case Stage::kRedispatch:
        for (std::int64_t i = t.m; i < t.m + t.n; ++i) {
          if (!is_here(v, v.pulls[i])) return false;
        }
        return true;
      case Stage::kRelay:
        return all_slots(v, t, [&](int source, std::int64_t slot) {
          return pushed_[{source, slot}] == v.hidden;
        });
      case Stage::kExpand:
        return true;  // of what forward left
      case Stage::kFc1:
        return rows_are_there(v, v.tiles[t.m]);
      case Stage::kRefc1:
        return x_is_there(v, v.tiles[t.m]);
      case Stage::kDfc2:
        return rows_are_there(v, v.tiles[t.m]) && h_is_there(v, v.tiles[t.m]);
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

  /// Whoever writes rows of the call writes over none that tasks have still to read.
  bool has_room(const PassView& v, const Task& t) {
    const std::int64_t ring = p_.routing.problem.backward_rows;
    const bool writes = v.stage(t.stage).grid == TileGrid::kPulls || t.stage == Stage::kRefc1 ||
                        t.stage == Stage::kDfc2;
    if (v.pass == Pass::kForward || ring == 0 || !writes) return true;
    for (const std::int64_t row : rows_of(v, t)) {
      for (std::int64_t before = row % ring; before < row; before += ring) {
        const int expert = expert_of(v, before);
        if (expert >= 0 && readers_done_[{v.rank, expert}] != readers_of(v, expert)) return false;
      }
    }
    return true;
  }

  static std::vector<std::int64_t> rows_of(const PassView& v, const Task& t) {
    std::vector<std::int64_t> rows;
    if (v.stage(t.stage).grid == TileGrid::kPulls) {
      for (std::int64_t i = t.m; i < t.m + t.n; ++i) {
        for (int c = 0; c < v.pulls[i].num_rows; ++c) {
          rows.push_back(v.pull_rows[v.pulls[i].first_row + c]);
        }
      }
    } else {
      for (int i = 0; i < v.tiles[t.m].rows; ++i) rows.push_back(v.tiles[t.m].first_row + i);
    }
    return rows;
  }
  /// Or -1, of pad rows.
  int expert_of(const PassView& v, std::int64_t row) const {
    for (int e = 0; e < v.num_local_experts; ++e) {
      const std::int64_t first = plan(v).segment_begin()[static_cast<std::size_t>(e)];
      const std::int64_t rows = plan(v).tokens_per_expert()[static_cast<std::size_t>(e)];
      if (row >= first && row < first + rows) return e;
    }
    return -1;
  }

  /// Tasks that read the expert's rows last: dfc1 and both weight gradients.
  std::int64_t readers_of(const PassView& v, int expert) const {
    const auto up = [](std::int64_t a, int b) { return ceil_div(a, std::int64_t{b}); };
    const std::int64_t rows = plan(v).tokens_per_expert()[static_cast<std::size_t>(expert)];
    const int m = v.schedule.tile_m, n = v.schedule.tile_n;
    return up(rows, m) * up(v.hidden, n) + up(v.hidden, m) * up(v.intermediate, n) +
           up(v.h_width(), m) * up(v.hidden, n);
  }
  void count_reader(const PassView& v, const Task& t) {
    if (t.stage == Stage::kDfc1) ++readers_done_[{v.rank, v.tiles[t.m].expert}];
    if (t.stage == Stage::kWgrad1 || t.stage == Stage::kWgrad2) {
      ++readers_done_[{v.rank, t.expert}];
    }
  }

  void write(const PassView& v, const Task& t) {
    if (t.stage == Stage::kSend) {
      const auto [begin, end] = host_items(v, t);
      for (std::int64_t i = begin; i < end; ++i) {
        const bool first =
            sent_.insert({v.rank, v.across->sent_tokens[i], static_cast<int>(t.n)}).second;
        EXPECT_TRUE(first) << "a token crosses once";
      }
      return;
    }
    if (t.stage == Stage::kRelay) {
      const bool once = all_slots(v, t, [&](int source, std::int64_t slot) {
        return returned_.insert({source, slot}).second;
      });
      EXPECT_TRUE(once) << "a row goes back once";
      return;
    }
    if (v.stage(t.stage).grid == TileGrid::kPulls) {
      for (std::int64_t i = t.m; i < t.m + t.n; ++i) {
        for (int c = 0; c < v.pulls[i].num_rows; ++c) {
          const std::int64_t row = v.pull_rows[v.pulls[i].first_row + c];
          EXPECT_TRUE(dispatches_shared(v) || !v.is_shared(expert_of(v, row))) << "row " << row;
          (t.stage == Stage::kDispatch ? rows_ : x_rows_).insert({v.rank, row});
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
        pushed_[{o.source, std::int64_t{o.token} * v.slots + o.slot}] += cols;
      }
    }
  }

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
  /// Known here apart from the schedule.
  bool dispatches_shared(const PassView& v) const {
    const Problem& p = p_.routing.problem;
    const bool weighs = p.probs == Probs::kAfter && p.shared_gate;
    return v.pass == Pass::kBackward && (weighs || p.backward_rows > 0);
  }
  /// Those that dispatch writes; tokens are always there.
  bool rows_are_there(const PassView& v, const Tile& tile) const {
    if (v.is_shared(tile.expert) && !dispatches_shared(v)) return true;
    return are_written(rows_, v, tile);
  }
  /// Of backward: forward may have left both.
  bool x_is_there(const PassView& v, const Tile& tile) const {
    return p_.routing.problem.save == Save::kRows || v.is_shared(tile.expert) ||
           are_written(x_rows_, v, tile);
  }
  bool h_is_there(const PassView& v, const Tile& tile) {
    const std::int64_t columns = ceil_div(v.intermediate, std::int64_t{v.schedule.tile_n / 2});
    return !p_.routing.problem.recompute_h || h_[{v.rank, tile.first_row}] == columns;
  }

  bool is_here(const PassView& v, const Pull& pull) const {
    if (v.is_here(pull.source)) return published_.contains(pull.source);
    return sent_.contains({pull.source, pull.token, v.layout.host_of(v.rank)});
  }

  /// Whether f(source, slot) holds for all slots whose rows, or sums of them, a task sends back.
  template <class F>
  bool all_slots(const PassView& v, const Task& t, F&& f) const {
    const int source = v.layout.relay(v.rank, static_cast<int>(t.n));
    const auto [begin, end] = host_items(v, t);
    for (std::int64_t i = begin; i < end; ++i) {
      const ReturnedRow& row = v.across->returned[i];
      const std::int32_t* ids = v.ids_of(source, row.token);
      for (int k = 0; k < v.topk; ++k) {
        const bool in_sum = v.choice.sums_cross && ids[k] >= 0 &&
                            ids[k] / v.group_experts == ids[row.slot] / v.group_experts;
        if (k != row.slot && !in_sum) continue;
        if (!f(source, std::int64_t{row.token} * v.slots + k)) return false;
      }
    }
    return true;
  }

  bool rows_came_back(const PassView& v, const Task& t) {
    const std::int64_t first = t.m * v.schedule.token_block;
    const std::int64_t end = min_of<std::int64_t>(first + v.schedule.token_block, v.tokens);
    for (std::int64_t token = first; token < end; ++token) {
      for (int k = 0; k < v.slots; ++k) {
        const std::int32_t id = k < v.topk ? v.topk_ids[token * v.topk + k] : -1;
        if (k < v.topk && id < 0) continue;
        const bool here = k >= v.topk || v.is_here(id / v.routed_experts());
        const std::pair<int, std::int64_t> slot{v.rank, token * v.slots + k};
        if (!(here ? pushed_[slot] == v.hidden : returned_.contains(slot))) return false;
      }
    }
    return true;
  }

  const RandomPass& p_;
  std::set<int> published_;
  std::set<std::tuple<int, std::int32_t, int>> sent_;  // source, token, host
  std::set<std::pair<int, std::int64_t>> returned_;    // source, slot
  Rows rows_;
  Rows x_rows_;                                                    // made again
  std::map<std::pair<int, std::int64_t>, std::int64_t> h_;         // column tiles made again
  std::map<std::pair<int, std::int64_t>, std::int64_t> computed_;  // column tiles, by first row
  std::map<std::pair<int, std::int64_t>, std::int64_t> pushed_;    // columns, by slot
  std::map<std::pair<int, int>, std::int64_t> readers_done_;       // tasks, by expert
};

void draw_arithmetic(Rng& rng, Problem& problem) {
  draw_shared_experts(rng, problem);
  if (chance(rng, 40)) problem.probs = Probs::kAfter;
}

TEST(Simulation, ExpertsTakeTurnsInARingOfRows) {
  const int count = cases(2500);
  int turns = 0;  // experts that wait for others' rows
  for (unsigned seed = 1; seed <= static_cast<unsigned>(count); ++seed) {
    RandomPass p = random_pass(seed, 80);
    Rng rng(seed);
    p.pass = Pass::kBackward;
    p.part = PassPart::kWhole;
    Problem& problem = p.routing.problem;
    problem.save = kSaves[seed % std::size(kSaves)];
    problem.recompute_h = seed % 5 >= 2;
    draw_arithmetic(rng, problem);
    const std::int64_t tokens = std::ranges::max(p.routing.tokens);
    problem.backward_rows =
        ring_rows(p.routing.ids, problem.num_experts, problem.row_align,
                  chance(rng, 50) ? 0 : pick(rng, 1, 4), problem.shared_experts > 0 ? tokens : 0);
    build_orders(p);
    for (int rank = 0; rank < p.ranks(); ++rank) {
      const PassView& v = p.view(rank);
      for (int e = 0; e < v.num_local_experts; ++e) {
        for_each_expert_before(v, e, [&](int) { ++turns; });
      }
    }
    const int fewest = p.view(0).schedule.dispatch_workers > 0 ? 2 : 1;
    for (const int workers : {fewest, 2, static_cast<int>(3 + seed % 4)}) {
      SCOPED_TRACE(cat(describe(seed, p), "\n  simulated workers ", workers));
      Data data(p);
      Interleaving(p, data, workers, seed).run();
      if (HasFatalFailure()) return;
    }
  }
  EXPECT_GT(turns, count);
}

TEST(Simulation, HostsExchangeTokensAndRows) {
  const int count = cases(1500);
  for (unsigned seed = 1; seed <= static_cast<unsigned>(count); ++seed) {
    RandomPass p = random_pass(seed, 40);
    Rng rng(seed);
    do {
      p.routing.hosts = static_cast<int>(pick(rng, 1, p.ranks()));
    } while (p.ranks() % p.routing.hosts != 0 || (p.routing.hosts == 1 && p.ranks() > 1));
    p.routing.problem.gathered_hosts = 1, p.routing.problem.first_host = -1;
    p.routing.problem.save = kSaves[seed % std::size(kSaves)];
    p.routing.problem.recompute_h = seed % 5 >= 2;
    draw_arithmetic(rng, p.routing.problem);
    build_orders(p);
    for (const int workers : {1, 2, static_cast<int>(3 + seed % 4)}) {
      SCOPED_TRACE(
          cat(describe(seed, p), "\n  ", p.routing.hosts, " hosts, simulated workers ", workers));
      Data data(p);
      Interleaving(p, data, workers, seed).run();
      if (HasFatalFailure() || HasFailure()) return;
    }
  }
}

TEST(Simulation, EveryScheduleCompletesInAnyOrderWithAnyNumberOfWorkers) {
  const int count = cases(2500);
  for (unsigned seed = 1; seed <= static_cast<unsigned>(count); ++seed) {
    RandomPass p = random_pass(seed, 40);
    Rng rng(seed);
    p.routing.problem.save = kSaves[seed % std::size(kSaves)];
    p.routing.problem.recompute_h = seed % 5 >= 2;
    draw_arithmetic(rng, p.routing.problem);
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
