// The graph of the layer is consistent: rows stand where their names say, what a stage reads has
// been written, and it waits for whoever wrote it.
#include "graph/layer_graph.h"

#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

#include "base/check.h"

namespace uniep::testing {
namespace {

/// Every choice of what forward keeps.
const std::vector<GraphChoice> kChoices = [] {
  std::vector<GraphChoice> all;
  for (const Save save : kSaves) {
    for (const bool recompute_h : {false, true}) {
      for (const std::int64_t backward_rows : {0, 128}) {
        for (const int hosts : {1, 2}) {
          for (const int groups : {1, 2}) {
            all.push_back(choice_of({.save = save,
                                     .recompute_h = recompute_h,
                                     .backward_rows = backward_rows,
                                     .combine_groups = groups},
                                    hosts));
          }
        }
      }
    }
  }
  return all;
}();

std::vector<StageRow> stages_of(const Graph& graph, Pass pass, GraphChoice choice) {
  std::vector<StageRow> rows;
  graph.for_each_stage(pass, [&](const StageRow& row) {
    if (holds(row.when, choice)) rows.push_back(row);
  });
  return rows;
}

/// Whether the stage at `reader` begins a task behind those of `writer` that it needs: it waits for
/// a counter that the writer signals, or for a stage in between that does.
bool follows(const std::vector<StageRow>& stages, std::size_t reader, std::size_t writer) {
  if ((stages[reader].waits & stages[writer].signals) != 0) return true;
  for (std::size_t between = writer + 1; between < reader; ++between) {
    const bool waits_for = (stages[reader].waits & stages[between].signals) != 0;
    if (waits_for && follows(stages, between, writer)) return true;
  }
  return false;
}

/// Whether the stage begins a task behind the release of the rows that it writes over: it waits for
/// that, or for a stage that does.
bool waits_for_release(const std::vector<StageRow>& stages, std::size_t writer) {
  for (std::size_t i = 0; i <= writer; ++i) {
    const bool waits = (stages[i].waits & bit_of(CounterKind::kReleased)) != 0;
    if (waits && (i == writer || follows(stages, writer, i))) return true;
  }
  return false;
}
/// Whether rows count as released when the stage has read them, or whoever follows it.
bool is_released(const std::vector<StageRow>& stages, std::size_t reader) {
  for (std::size_t i = 0; i < stages.size(); ++i) {
    const bool signals = (stages[i].signals & bit_of(CounterKind::kReleased)) != 0;
    if (signals && (i == reader || follows(stages, i, reader))) return true;
  }
  return false;
}

/// In a ring of rows: who writes over rows that are still read.
std::vector<std::string> ring_faults(const Graph& graph, GraphChoice choice) {
  std::vector<std::string> faults;
  const std::vector<StageRow> stages = stages_of(graph, Pass::kBackward, choice);
  for (std::size_t i = 0; i < stages.size(); ++i) {
    const auto of_ring = [&](Tensor t) {
      return has_extent(graph[t], Extent::kRows) &&
             is_of_call(graph, Pass::kBackward, graph[t], choice);
    };
    for (const Tensor t : stages[i].writes) {
      if (of_ring(t) && !waits_for_release(stages, i)) {
        faults.push_back(cat(stages[i].name, " does not wait for room in ", graph[t].name));
      }
    }
    for (const Tensor t : stages[i].reads) {
      if (of_ring(t) && !is_released(stages, i)) {
        faults.push_back(cat(stages[i].name, " reads ", graph[t].name, ", and nobody says when"));
      }
    }
  }
  return faults;
}

/// What is wrong with a graph, a sentence each.
std::vector<std::string> faults_of(const Graph& graph, GraphChoice choice) {
  std::vector<std::string> faults =
      choice.has_ring ? ring_faults(graph, choice) : std::vector<std::string>{};
  for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
    const std::vector<StageRow> stages = stages_of(graph, pass, choice);
    for (std::size_t reader = 0; reader < stages.size(); ++reader) {
      for (const Tensor tensor : stages[reader].reads) {
        if (!holds(graph[tensor].when, choice)) continue;
        bool written = false;
        for (std::size_t writer = 0; writer < reader; ++writer) {
          if (!stages[writer].writes.contains(tensor)) continue;
          written = true;
          if (follows(stages, reader, writer)) continue;
          faults.push_back(cat(stages[reader].name, " does not wait for ", stages[writer].name,
                               ", which writes ", graph[tensor].name));
        }
        const TensorRow& row = graph[tensor];
        const bool kept = pass == Pass::kBackward && is_saved(row, choice);
        if (written || kept || row.region == Region::kCallers) continue;
        faults.push_back(cat(stages[reader].name, " reads ", row.name, ", which nobody wrote"));
      }
    }
  }
  return faults;
}
std::vector<std::string> faults_of(const Graph& graph) {
  std::vector<std::string> all;
  for (const GraphChoice choice : kChoices) {
    const std::vector<std::string> faults = faults_of(graph, choice);
    all.insert(all.end(), faults.begin(), faults.end());
  }
  return all;
}

TEST(LayerGraph, RowsStandWhereTheirNamesSay) {
  std::set<std::string> names;
  for (int i = 0; i < kLayerGraph.num_tensors; ++i) {
    EXPECT_EQ(static_cast<int>(kLayerGraph.tensors[i].tensor), i);
    EXPECT_TRUE(names.insert(kLayerGraph.tensors[i].name).second) << kLayerGraph.tensors[i].name;
  }
  for (int i = 0; i < kLayerGraph.num_counters; ++i) {
    EXPECT_EQ(static_cast<int>(kLayerGraph.counters[i].kind), i);
  }
  for (int i = 0; i < kLayerGraph.num_stages; ++i) {
    const StageRow& row = kLayerGraph.stages[i];
    EXPECT_STREQ(row.name, name(row.stage));
    EXPECT_EQ(kLayerGraph.find(row.pass, row.stage), &row) << "one row a pass";
  }
}

TEST(LayerGraph, WhatAStageReadsWasWrittenAndIsWaitedFor) {
  EXPECT_EQ(faults_of(kLayerGraph), std::vector<std::string>{});
}

TEST(LayerGraph, AWaitThatIsMissingIsFound) {
  for (int i = 0; i < kLayerGraph.num_stages; ++i) {
    for_each_counter(kLayerGraph.stages[i].waits, [&](CounterKind kind) {
      Graph broken = kLayerGraph;
      broken.stages[i].waits = static_cast<CounterSet>(broken.stages[i].waits & ~bit_of(kind));
      EXPECT_FALSE(faults_of(broken).empty()) << broken.stages[i].name << ", " << name(kind);
    });
  }
}

TEST(LayerGraph, AReleaseThatIsMissingIsFound) {
  for (int i = 0; i < kLayerGraph.num_stages; ++i) {
    const CounterSet released = bit_of(CounterKind::kReleased);
    if ((kLayerGraph.stages[i].signals & released) == 0) continue;
    Graph broken = kLayerGraph;
    broken.stages[i].signals = static_cast<CounterSet>(broken.stages[i].signals & ~released);
    EXPECT_FALSE(faults_of(broken).empty()) << broken.stages[i].name;
  }
}

/// But for `released`, which experts signal that stand earlier.
TEST(LayerGraph, EveryCounterIsSignalledBeforeItIsWaitedFor) {
  for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
    CounterSet signalled = bit_of(CounterKind::kReleased);
    for (const StageRow& row :
         stages_of(kLayerGraph, pass, choice_of({.save = Save::kNone, .recompute_h = true}, 2))) {
      EXPECT_EQ(row.waits & ~signalled, 0) << row.name;
      signalled = static_cast<CounterSet>(signalled | row.signals);
    }
  }
}

/// Who waits on a GPU orders what comes after by one fence, as wide as the last counter asks for;
/// who dispatches, by one a counter.
TEST(LayerGraph, AStageWaitsForCountersOfOneRegion) {
  for (int i = 0; i < kLayerGraph.num_stages; ++i) {
    const StageRow& row = kLayerGraph.stages[i];
    if (row.grid == TileGrid::kPulls) continue;
    const auto symmetric = static_cast<CounterSet>(row.waits & kSymmetricCounters);
    EXPECT_TRUE(symmetric == 0 || symmetric == row.waits) << row.name;
  }
}

/// A tensor that is saved with one choice and made again with another has memory with both; what
/// no stage of a choice reads has none.
TEST(LayerGraph, TensorsHaveMemoryWhileTheyAreNeeded) {
  for (const GraphChoice choice : kChoices) {
    for (const Tensor t : {Tensor::kXRows, Tensor::kH}) {
      const TensorRow& row = kLayerGraph[t];
      const bool of_x = t == Tensor::kXRows;
      const bool again = of_x ? choice.drops_x_rows : choice.drops_h;
      EXPECT_EQ(is_saved(row, choice), !again) << row.name;
      EXPECT_EQ(is_of_call(kLayerGraph, Pass::kBackward, row, choice), again) << row.name;
      // Forward reads rows of x, but h only as it makes it.
      EXPECT_EQ(is_of_call(kLayerGraph, Pass::kForward, row, choice), again && of_x) << row.name;
    }
    EXPECT_EQ(holds(kLayerGraph[Tensor::kXTokens].when, choice), choice.drops_received);
    EXPECT_EQ(is_saved(kLayerGraph[Tensor::kReceived], choice),
              choice.drops_x_rows && !choice.drops_received);
  }
}

TEST(LayerGraph, OnlyWhatStagesOfATileGridCutHasColumns) {
  for (int i = 0; i < kLayerGraph.num_stages; ++i) {
    const StageRow& row = kLayerGraph.stages[i];
    const bool of_weights = row.grid == TileGrid::kWeightTiles;
    EXPECT_EQ(row.rows != Extent::kOne, of_weights) << row.name;
    EXPECT_EQ(row.kind == StageKind::kProduct, row.reduction != Extent::kOne) << row.name;
    EXPECT_EQ(row.place == StagePlace::kEnter, row.grid == TileGrid::kNone) << row.name;
  }
}

}  // namespace
}  // namespace uniep::testing
