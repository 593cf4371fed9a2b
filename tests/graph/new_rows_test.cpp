// A stage and a tensor are rows: these add one that moves, one that adds up, a counter and a tensor
// of one byte an element to a copy of the layer's graph, and no other line. Layouts, order, waits,
// signals, simulated times and traces of them are right.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "layout/workspace.h"
#include "schedule/interleaving.h"
#include "trace/chrome_trace.h"
#include "tune/made_up_profile.h"
#include "tune/model/simulation.h"
#include "tune/plans_of_shape.h"

namespace uniep::testing {
namespace {

constexpr auto kSqueezed = static_cast<Tensor>(kNumTensors);
constexpr auto kSqueezeDone = static_cast<CounterKind>(kNumCounterKinds);
constexpr auto kSqueeze = static_cast<Stage>(kNumStages);    // moves rows, ahead of fc1
constexpr auto kTotal = static_cast<Stage>(kNumStages + 1);  // adds token rows up, behind reduce

/// `row` in front of the first stage of its place in its pass, or behind all.
constexpr void insert(Graph& graph, const StageRow& row, Stage before) {
  graph.add(row);
  for (int i = graph.num_stages - 1; i > 0; --i) {
    const StageRow other = graph.stages[i - 1];
    if (before == row.stage) return;
    graph.stages[i] = other;
    graph.stages[i - 1] = row;
    if (other.pass == row.pass && other.stage == before) return;
  }
}

constexpr Graph kWithNewRows = [] {
  Graph g = kLayerGraph;
  g.add({.tensor = kSqueezed,
         .name = "squeezed",
         .element = Element::kByte,
         .shape = {Extent::kRows, Extent::kHidden},
         .lifetime = Lifetime::kSaved});
  g.add({kSqueezeDone, "squeeze_done", CounterOf::kTile});
  insert(g,
         {.pass = Pass::kForward,
          .stage = kSqueeze,
          .name = "squeeze",
          .kind = StageKind::kMove,
          .grid = TileGrid::kRowTiles,
          .place = StagePlace::kFirst,
          .cols = Extent::kHidden,
          .reads = {Tensor::kXRows},
          .writes = {kSqueezed},
          .waits = bit_of(CounterKind::kRowsReady),
          .signals = bit_of(kSqueezeDone)},
         Stage::kFc1);
  insert(g,
         {.pass = Pass::kForward,
          .stage = kTotal,
          .name = "total",
          .kind = StageKind::kSum,
          .grid = TileGrid::kTokenBlocks,
          .place = StagePlace::kLast,
          .cols = Extent::kHidden,
          .reads = {Tensor::kCombine},
          .writes = {Tensor::kOut},
          .waits = bit_of(CounterKind::kArrived)},
         kTotal);
  for (StageRow& row : g.stages) {
    if (row.pass == Pass::kForward && row.stage == Stage::kFc1) row.waits = bit_of(kSqueezeDone);
  }
  return g;
}();

TEST(NewRows, StandInTheGraphInOrder) {
  std::vector<std::string> names;
  kWithNewRows.for_each_stage(Pass::kForward,
                              [&](const StageRow& row) { names.emplace_back(row.name); });
  EXPECT_EQ(names, (std::vector<std::string>{"enter", "send", "dispatch", "squeeze", "fc1", "fc2",
                                             "relay", "reduce", "total"}));
}

TEST(NewRows, HavePlacesInMemory) {
  const Problem p{.hidden = 72, .intermediate = 40, .num_experts = 8, .topk = 2, .max_tokens = 50};
  constexpr std::int64_t kRowsHeld = 333;
  const SavedLayout before(p, kRowsHeld, 0), after(p, kRowsHeld, 0, kWithNewRows);
  EXPECT_EQ(after[kSqueezed], before.bytes);
  EXPECT_EQ(after.bytes, before.bytes + round_up<std::int64_t>(kRowsHeld * 72, 256));
  EXPECT_EQ(after[Tensor::kH], before[Tensor::kH]);
  const LocalCounterLayout counters(p, 4), with_new(p, 4, kWithNewRows);
  EXPECT_EQ(with_new[kSqueezeDone], counters.bytes);
  EXPECT_EQ(with_new.bytes - counters.bytes,
            counters[CounterKind::kExpertDone] - counters[CounterKind::kTileDone])
      << "as many counters as of another kind of tiles";
  const Extents extents = extents_of(p, 4, 0);
  EXPECT_EQ(bytes_of_row(kWithNewRows, extents) - bytes_of_row(kLayerGraph, extents), 72)
      << "a byte an element";
}

/// What forward has written, by the new rows' meaning.
class Data {
 public:
  void publish(int rank) { published_.insert(rank); }

  bool inputs_written(const PassView& v, const Task& t) {
    if (t.stage == kSqueeze) return rows_are_there(v, v.tiles[t.m]);
    if (t.stage == Stage::kFc1) {
      return squeezed_[{v.rank, t.m}] == ceil_div<std::int64_t>(v.hidden, v.schedule.tile_n);
    }
    if (t.stage == kTotal || t.stage == Stage::kReduce) return all_came_back(v, t);
    return true;
  }

  void run(const PassView& v, const Task& t) {
    ++tasks_[t.stage];
    if (t.stage == Stage::kDispatch) {
      for (std::int64_t i = t.m; i < t.m + t.n; ++i) {
        for (int c = 0; c < v.pulls[i].num_rows; ++c) {
          rows_.insert({v.rank, v.pull_rows[v.pulls[i].first_row + c]});
        }
      }
    } else if (t.stage == kSqueeze) {
      ++squeezed_[{v.rank, t.m}];
    } else if (t.stage == Stage::kFc2) {
      for (int i = 0; i < v.tiles[t.m].rows; ++i) {
        const RowOrigin& o = v.row_origin[v.tiles[t.m].first_row + i];
        pushed_[{o.source, std::int64_t{o.token} * v.topk + o.slot}] +=
            column_tile(stage_grid(v, Stage::kFc2), t.n).count;
      }
    }
  }

  std::int64_t tasks(Stage stage) { return tasks_[stage]; }

 private:
  bool rows_are_there(const PassView& v, const Tile& tile) const {
    for (int i = 0; i < tile.rows; ++i) {
      if (!rows_.contains({v.rank, tile.first_row + i})) return false;
    }
    return true;
  }
  bool all_came_back(const PassView& v, const Task& t) {
    const std::int64_t slots = v.schedule.token_block * std::int64_t{v.topk};
    const std::int64_t end = min_of(slots * (t.m + 1), v.tokens * v.topk);
    for (std::int64_t slot = slots * t.m; slot < end; ++slot) {
      if (v.topk_ids[slot] >= 0 && pushed_[{v.rank, slot}] != v.hidden) return false;
    }
    return true;
  }

  std::set<int> published_;
  std::set<std::pair<int, std::int64_t>> rows_;
  std::map<std::pair<int, std::int64_t>, std::int64_t> squeezed_;  // column tiles, by tile
  std::map<std::pair<int, std::int64_t>, std::int64_t> pushed_;    // columns, by slot
  std::map<Stage, std::int64_t> tasks_;
};

TEST(NewRows, RunOnceAndInOrderUnderEverySchedule) {
  int forwards = 0;
  for (unsigned seed = 1; seed <= static_cast<unsigned>(cases(600)); ++seed) {
    const RandomPass p = random_pass(seed, 40, 4, kWithNewRows);
    if (p.pass != Pass::kForward) continue;
    ++forwards;
    SCOPED_TRACE(describe(seed, p));
    Data data;
    Interleaving(p, data, static_cast<int>(1 + seed % 4), seed).run();
    if (HasFatalFailure()) return;
    std::int64_t tiles = 0, blocks = 0;
    for (int rank = 0; rank < p.ranks(); ++rank) {
      const PassView& v = p.view(rank);
      tiles += v.tile_begin[v.num_blocks()] * ceil_div<std::int64_t>(v.hidden, v.schedule.tile_n);
      blocks += v.num_token_blocks();
    }
    ASSERT_EQ(data.tasks(kSqueeze), tiles);
    ASSERT_EQ(data.tasks(kTotal), blocks);
  }
  EXPECT_GT(forwards, 0);
}

TEST(NewRows, CostWhatTheyMoveAndAreNamedInTraces) {
  const auto plans =
      plans_of_shape("custom,tokens=256,hidden=512,intermediate=64,experts=4,topk=2", 2);
  tune::MachineProfile profile = made_up_profile();
  profile.dispatch.per_byte = 1e-3;
  profile.reduce.per_byte = 1e-4;
  Schedule schedule;
  schedule.launch = LaunchGrouping::kSeparate;
  const auto simulated = [&](const Graph& graph) {
    return tune::simulate(plans, Pass::kForward, schedule, profile,
                          {.record_timeline = true, .graph = &graph});
  };
  const tune::SimulatedPass plain = simulated(kLayerGraph), with_new = simulated(kWithNewRows);
  EXPECT_EQ(plain.stats[0].launches + 2, with_new.stats[0].launches) << "a launch each";
  EXPECT_GT(with_new.seconds, plain.seconds);
  for (std::size_t rank = 0; rank < plans.size(); ++rank) {
    const Traffic moved = plans[rank].traffic();
    // A byte an element of every row; and of each token K rows of combine and one of out, in bf16.
    EXPECT_NEAR(with_new.stats[rank][kSqueeze].busy_s, 1e-3 * static_cast<double>(moved.rows * 512),
                1e-6);
    EXPECT_NEAR(with_new.stats[rank][kTotal].busy_s, 1e-4 * 256 * 3 * 512 * 2, 1e-6);
  }
  std::ostringstream text;
  trace::write_chrome_trace(text, with_new.timeline, {}, kWithNewRows);
  std::map<std::string, int> slices;
  const auto file = nlohmann::json::parse(text.str());
  for (const auto& event : file.at("traceEvents")) {
    if (event.at("ph") == "X") ++slices[event.at("name").get<std::string>()];
  }
  EXPECT_GT(slices["squeeze"], 0);
  EXPECT_GT(slices["total"], 0);
}

}  // namespace
}  // namespace uniep::testing
