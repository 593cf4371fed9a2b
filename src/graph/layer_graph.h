#pragma once

#include "graph/graph.h"

// The layer that this library runs: one row a tensor, a counter and a stage. tests/graph checks
// that it is consistent, and that code follows a row that it has never seen.

namespace uniep {
namespace detail {

constexpr void add_tensors(Graph& g) {
  using enum Tensor;
  using enum Element;
  // As documentation writes shapes.
  constexpr auto T = Extent::kTokens, K = Extent::kTopk, H = Extent::kHidden;
  constexpr auto S = Extent::kShared, slots = Extent::kSlots, results = Extent::kResultRows;
  constexpr auto I = Extent::kIntermediate, El = Extent::kLocalExperts, two = Extent::kHalves;
  constexpr auto rows = Extent::kRows, groups = Extent::kDprobGroups;

  const auto of_caller = [&](TensorRow row) { row.region = Region::kCallers, g.add(row); };
  of_caller({kX, "x", kBf16, {T, H}});
  of_caller({kTopkProbs, "topk_probs", kFp32, {T, K}});
  of_caller({kDy, "dy", kBf16, {T, H}});
  of_caller({kW1, "w1", kBf16, {El, two, I, H}});
  of_caller({kW2, "w2", kBf16, {El, H, I}});
  of_caller({kOut, "out", kBf16, {T, results, H}});
  of_caller({kDx, "dx", kBf16, {T, results, H}});
  of_caller({kDprobs, "dprobs", kFp32, {T, K}});
  // Overwritten in bf16; or added to a main gradient, whose type its WeightGrad says.
  of_caller({kDw1, "dw1", kBf16, {El, two, I, H}});
  of_caller({kDw2, "dw2", kBf16, {El, H, I}});
  const auto of_bias = [&](TensorRow row) { row.when = When::kHasBias, of_caller(row); };
  of_bias({kB1, "b1", kBf16, {El, two, I}});
  of_bias({kB2, "b2", kBf16, {El, H}});
  of_bias({kDb1, "db1", kBf16, {El, two, I}});  // as dw1 and dw2
  of_bias({kDb2, "db2", kBf16, {El, H}});
  const auto of_shared = [&](TensorRow row) { row.when = When::kHasShared, of_caller(row); };
  of_shared({kSharedW1, "shared_w1", kBf16, {S, two, I, H}});
  of_shared({kSharedW2, "shared_w2", kBf16, {S, H, I}});
  of_shared({kSharedProbs, "shared_probs", kFp32, {T, S}});
  of_shared({kDsharedProbs, "dshared_probs", kFp32, {T, S}});
  of_shared({kDsharedW1, "dshared_w1", kBf16, {S, two, I, H}});  // as dw1 and dw2
  of_shared({kDsharedW2, "dshared_w2", kBf16, {S, H, I}});

  const auto symmetric = [&](TensorRow row) {
    row.region = Region::kSymmetric, row.lifetime = Lifetime::kLayer, g.add(row);
  };
  symmetric({kTokens, "tokens", kBf16, {T, H}});
  symmetric({kProbs, "probs", kFp32, {T, slots}});
  symmetric({kCombine, "combine", kBf16, {T, slots, H}});
  symmetric({kDprobSlots, "dprob_slots", kFp32, {T, slots}});
  symmetric({.tensor = kXTokens,
             .name = "x_tokens",
             .element = kBf16,
             .shape = {T, H},
             .when = When::kReceivedDropped});

  symmetric({.tensor = kSums,
             .name = "sums",
             .element = kFp32,
             .shape = {T, K, H},
             .when = When::kFp32Sums});

  const auto saved = [&](TensorRow row) { row.lifetime = Lifetime::kSaved, g.add(row); };
  saved({.tensor = kXRows,
         .name = "x_rows",
         .element = kBf16,
         .shape = {rows, H},
         .remade = When::kXRowsDropped});
  saved({.tensor = kReceived,
         .name = "received",
         .element = kBf16,
         .shape = {Extent::kReceived, H},
         .when = When::kReceivedKept});
  saved({.tensor = kH,
         .name = "h",
         .element = kBf16,
         .shape = {rows, two, I},
         .remade = When::kHDropped});
  saved({kRowProbs, "row_probs", kFp32, {rows}});

  const auto of_call = [&](TensorRow row) { g.add(row); };
  of_call({kA, "a", kBf16, {rows, I}});
  of_call({kDyRows, "dy_rows", kBf16, {rows, H}});
  of_call({.tensor = kDh, .name = "dh", .element = kBf16, .shape = {rows, two, I}, .over = kH});
  of_call({kDprobGroups, "dprob_groups", kFp32, {rows, groups}});
}

constexpr void add_counters(Graph& g) {
  g.add({CounterKind::kPublished, "published", CounterOf::kSource});
  g.add({CounterKind::kCrossed, "crossed", CounterOf::kCrossing, When::kHosts});
  g.add({CounterKind::kRowsReady, "rows_ready", CounterOf::kRowGroup});
  g.add({CounterKind::kXReady, "x_ready", CounterOf::kRowGroup});
  g.add({CounterKind::kXDone, "x_done", CounterOf::kExpertRows});
  g.add({CounterKind::kHReady, "h_ready", CounterOf::kTile});
  g.add({CounterKind::kTileDone, "tile_done", CounterOf::kTile});
  g.add({CounterKind::kExpertDone, "expert_done", CounterOf::kExpert});
  g.add({CounterKind::kReleased, "released", CounterOf::kExpertUses, When::kInRing});
  g.add({CounterKind::kArrived, "arrived", CounterOf::kTokenBlock});
  g.add({CounterKind::kPushed, "pushed", CounterOf::kPiece, When::kHosts});
  g.add({CounterKind::kReturned, "returned", CounterOf::kReturn, When::kHosts});
}

// Colours: communication is orange; products are blue forward, green in data gradients, violet in
// weight gradients, those with w1 and w2 in two tones. All that stand together in a pass differ in
// lightness too (tests/trace/palette_test.cpp).

/// What only this pass knows is left out: the rows of dispatch and reduce differ in what they move.
constexpr StageRow enter_row(Pass pass) {
  return {.pass = pass,
          .stage = Stage::kEnter,
          .name = name(Stage::kEnter),
          .signals = bit_of(CounterKind::kPublished)};
}
/// Tokens to the hosts that need them: a rank of the rail there holds them for all of its host.
constexpr StageRow send_row(Pass pass) {
  return {.pass = pass,
          .stage = Stage::kSend,
          .name = name(Stage::kSend),
          .kind = StageKind::kMove,
          .side = StageSide::kRail,
          .grid = TileGrid::kCrossings,
          .place = StagePlace::kCross,
          .cols = Extent::kHidden,
          .waits = bit_of(CounterKind::kPublished),
          .signals = bit_of(CounterKind::kCrossed),
          .look = {"#f4953a", "thread_state_iowait"},
          .when = When::kHosts,
          .like = Stage::kDispatch};
}
constexpr StageRow dispatch_row(Pass pass) {
  return {.pass = pass,
          .stage = Stage::kDispatch,
          .name = name(Stage::kDispatch),
          .kind = StageKind::kMove,
          .side = StageSide::kPull,
          .grid = TileGrid::kPulls,
          .place = StagePlace::kDispatch,
          .cols = Extent::kHidden,
          .waits = bit_of(CounterKind::kPublished) | bit_of(CounterKind::kCrossed),
          .signals = bit_of(CounterKind::kRowsReady),
          .look = {"#f4953a", "rail_animation"}};
}
/// Rows of x once more.
constexpr StageRow refetch_row(Stage stage) {
  StageRow row = dispatch_row(Pass::kBackward);
  row.stage = stage;
  row.name = name(stage);
  row.place = StagePlace::kRedispatch;
  row.like = Stage::kDispatch;
  row.writes = {Tensor::kXRows};
  row.waits |= bit_of(CounterKind::kReleased);
  row.signals = bit_of(CounterKind::kXReady) | bit_of(CounterKind::kXDone);
  row.look.trace_color = "rail_load";
  return row;
}
/// What a host has made of a rail's tokens, back to their rank: rows, or with combine groups that
/// keep to hosts their sums.
constexpr StageRow relay_row(Pass pass) {
  return {.pass = pass,
          .stage = Stage::kRelay,
          .name = name(Stage::kRelay),
          .kind = StageKind::kSum,
          .side = StageSide::kRail,
          .grid = TileGrid::kReturns,
          .place = StagePlace::kReturn,
          .cols = Extent::kHidden,
          .waits = bit_of(CounterKind::kPushed),
          .signals = bit_of(CounterKind::kReturned),
          .look = {"#b51826", "terrible"},
          .when = When::kHosts,
          .like = Stage::kReduce};
}
constexpr StageRow reduce_row(Pass pass) {
  return {.pass = pass,
          .stage = Stage::kReduce,
          .name = name(Stage::kReduce),
          .kind = StageKind::kSum,
          .grid = TileGrid::kTokenBlocks,
          .place = StagePlace::kLast,
          .cols = Extent::kHidden,
          .waits = bit_of(CounterKind::kArrived) | bit_of(CounterKind::kReturned),
          .look = {"#b51826", "bad"}};
}
/// A product whose tiles are of dispatched rows.
constexpr StageRow product_row(Pass pass, Stage stage, StagePlace place) {
  return {.pass = pass,
          .stage = stage,
          .name = name(stage),
          .kind = StageKind::kProduct,
          .grid = TileGrid::kRowTiles,
          .place = place};
}
constexpr StageRow weights_row(Stage stage) {
  return {.pass = Pass::kBackward,
          .stage = stage,
          .name = name(stage),
          .kind = StageKind::kProduct,
          .grid = TileGrid::kWeightTiles,
          .place = StagePlace::kWeights,
          .reduction = Extent::kRows,
          .waits = bit_of(CounterKind::kExpertDone),
          .signals = bit_of(CounterKind::kReleased)};
}

constexpr void add_forward(Graph& g) {
  using enum Tensor;
  constexpr Pass kPass = Pass::kForward;
  StageRow enter = enter_row(kPass);
  enter.reads = {kX, kTopkProbs, kSharedProbs};
  enter.writes = {kTokens, kProbs};
  g.add(enter);

  StageRow send = send_row(kPass);
  send.reads = send.writes = {kTokens, kProbs};
  g.add(send);

  StageRow dispatch = dispatch_row(kPass);
  dispatch.reads = {kTokens, kProbs};
  dispatch.writes = {kXRows, kRowProbs, kReceived};
  g.add(dispatch);

  StageRow fc1 = product_row(kPass, Stage::kFc1, StagePlace::kFirst);
  fc1.cols = Extent::kIntermediate;
  fc1.reduction = Extent::kHidden;
  fc1.halves = 2;
  fc1.reads = {kXRows, kW1, kRowProbs, kB1, kSharedW1, kX};
  fc1.writes = {kH, kA};
  fc1.waits = bit_of(CounterKind::kRowsReady);
  fc1.signals = bit_of(CounterKind::kTileDone);
  fc1.look = {"#0e4074", "thread_state_runnable"};
  g.add(fc1);

  StageRow fc2 = product_row(kPass, Stage::kFc2, StagePlace::kSecond);
  fc2.side = StageSide::kPush;
  fc2.cols = Extent::kHidden;
  fc2.reduction = Extent::kIntermediate;
  fc2.reads = {kA, kW2, kRowProbs, kB2, kSharedW2};
  fc2.writes = {kCombine};
  fc2.waits = bit_of(CounterKind::kTileDone);
  fc2.signals = bit_of(CounterKind::kArrived) | bit_of(CounterKind::kPushed);
  fc2.look = {"#3d9bd0", "rail_idle"};
  g.add(fc2);

  StageRow relay = relay_row(kPass);
  relay.reads = {kCombine, kProbs};
  relay.writes = {kCombine, kSums};
  g.add(relay);

  StageRow reduce = reduce_row(kPass);
  reduce.reads = {kCombine, kSums, kTopkProbs, kSharedProbs};
  reduce.writes = {kOut};
  g.add(reduce);
}

constexpr void add_backward(Graph& g) {
  using enum Tensor;
  constexpr Pass kPass = Pass::kBackward;
  StageRow enter = enter_row(kPass);
  enter.reads = {kDy, kX};
  enter.writes = {kTokens, kXTokens};
  g.add(enter);

  StageRow send = send_row(kPass);
  send.reads = send.writes = {kTokens, kXTokens};
  g.add(send);

  StageRow dispatch = dispatch_row(kPass);
  dispatch.reads = {kTokens, kRowProbs};
  dispatch.writes = {kDyRows};
  dispatch.waits |= bit_of(CounterKind::kReleased);
  g.add(dispatch);

  StageRow redispatch = refetch_row(Stage::kRedispatch);
  redispatch.when = When::kReceivedDropped;
  redispatch.reads = {kXTokens};
  g.add(redispatch);

  StageRow expand = refetch_row(Stage::kExpand);
  expand.when = When::kReceivedKept;
  expand.side = StageSide::kLocal;
  expand.look.trace_color = "light_memory_dump";
  expand.reads = {kReceived};
  expand.waits = bit_of(CounterKind::kReleased);
  g.add(expand);

  StageRow refc1 = product_row(kPass, Stage::kRefc1, StagePlace::kRecompute);
  refc1.like = Stage::kFc1;
  refc1.when = When::kHDropped;
  refc1.cols = Extent::kIntermediate;
  refc1.reduction = Extent::kHidden;
  refc1.halves = 2;
  refc1.reads = {kXRows, kW1, kB1, kSharedW1, kX};
  refc1.writes = {kH};
  // For room for h, where rows of x were kept.
  refc1.waits = bit_of(CounterKind::kXReady) | bit_of(CounterKind::kReleased);
  refc1.signals = bit_of(CounterKind::kHReady);
  refc1.look = {"#0c0030", "thread_state_sleeping"};
  g.add(refc1);

  StageRow dfc2 = product_row(kPass, Stage::kDfc2, StagePlace::kFirst);
  dfc2.cols = Extent::kIntermediate;
  dfc2.reduction = Extent::kHidden;
  dfc2.reads = {kDyRows, kW2, kH, kRowProbs, kB2, kSharedW2, kDy};
  dfc2.writes = {kDh, kA, kDprobGroups};
  dfc2.waits = bit_of(CounterKind::kRowsReady) | bit_of(CounterKind::kHReady);
  dfc2.signals = bit_of(CounterKind::kTileDone) | bit_of(CounterKind::kExpertDone);
  dfc2.look = {"#0c5045", "thread_state_running"};
  g.add(dfc2);

  StageRow dfc1 = product_row(kPass, Stage::kDfc1, StagePlace::kSecond);
  dfc1.side = StageSide::kPush;
  dfc1.cols = Extent::kHidden;
  dfc1.reduction = Extent::kBothHalves;
  dfc1.reads = {kDh, kW1, kDprobGroups, kRowProbs, kSharedW1};
  dfc1.writes = {kCombine, kDprobSlots};
  dfc1.waits = bit_of(CounterKind::kTileDone);
  // Else rows could all be back, and x_tokens be overwritten, before they have been pulled.
  dfc1.also_waits = bit_of(CounterKind::kXReady);
  dfc1.also_when = When::kReceivedDropped;
  dfc1.signals =
      bit_of(CounterKind::kArrived) | bit_of(CounterKind::kPushed) | bit_of(CounterKind::kReleased);
  dfc1.look = {"#56ab68", "good"};
  g.add(dfc1);

  StageRow wgrad2 = weights_row(Stage::kWgrad2);
  wgrad2.rows = Extent::kHidden;
  wgrad2.cols = Extent::kIntermediate;
  wgrad2.reads = {kDyRows, kA, kRowProbs, kDy};
  wgrad2.writes = {kDw2, kDb2, kDsharedW2};
  wgrad2.look = {"#442067", "rail_response"};
  g.add(wgrad2);

  StageRow wgrad1 = weights_row(Stage::kWgrad1);
  wgrad1.rows = Extent::kBothHalves;
  wgrad1.cols = Extent::kHidden;
  wgrad1.reads = {kDh, kXRows, kX};
  wgrad1.waits = bit_of(CounterKind::kXDone) | bit_of(CounterKind::kExpertDone);
  wgrad1.writes = {kDw1, kDb1, kDsharedW1};
  wgrad1.look = {"#907db1", "startup"};
  g.add(wgrad1);

  StageRow relay = relay_row(kPass);
  relay.reads = {kCombine, kDprobSlots};
  relay.writes = {kCombine, kDprobSlots, kSums};
  g.add(relay);

  StageRow reduce = reduce_row(kPass);
  reduce.reads = {kCombine, kDprobSlots, kSums};
  reduce.writes = {kDx, kDprobs, kDsharedProbs};
  g.add(reduce);
}

constexpr Graph make_layer_graph() {
  Graph g;
  add_tensors(g);
  add_counters(g);
  add_forward(g);
  add_backward(g);
  return g;
}

}  // namespace detail

inline constexpr Graph kLayerGraph = detail::make_layer_graph();
static_assert(kLayerGraph.num_tensors == kNumTensors);
static_assert(kLayerGraph.num_counters == kNumCounterKinds);

constexpr const char* name(CounterKind kind) { return kLayerGraph[kind].name; }
constexpr const char* name(Tensor tensor) { return kLayerGraph[tensor].name; }

/// The row of a stage that is in one pass only, or the first of its rows: for code that is compiled
/// for a stage.
constexpr const StageRow& row_of(Stage stage) { return *kLayerGraph.find(stage); }

/// Whether the stage's tasks wait for the link before they copy.
constexpr bool pulls(Stage stage) {
  const StageRow* row = kLayerGraph.find(stage);
  return row != nullptr && row->side == StageSide::kPull;
}

/// Whether the stage's tasks copy tokens to their rows.
constexpr bool fills_rows(Stage stage) {
  const StageRow* row = kLayerGraph.find(stage);
  return row != nullptr && row->grid == TileGrid::kPulls;
}

/// Counters that groups of several hosts alone have.
inline constexpr CounterSet kCountersOfHosts = [] {
  CounterSet set = 0;
  for (int i = 0; i < kLayerGraph.num_counters; ++i) {
    const CounterRow& row = kLayerGraph.counters[i];
    if (row.when == When::kHosts) set = static_cast<CounterSet>(set | bit_of(row.kind));
  }
  return set;
}();

/// What code that is compiled for a stage waits for and signals: kernels, whose ranks are of one
/// host.
template <Stage stage>
inline constexpr CounterSet kWaitsOf = static_cast<CounterSet>(row_of(stage).waits &
                                                               ~kCountersOfHosts);
template <Stage stage>
inline constexpr CounterSet kSignalsOf = static_cast<CounterSet>(row_of(stage).signals &
                                                                 ~kCountersOfHosts);

/// Counters of the layer that lie in symmetric memory.
inline constexpr CounterSet kSymmetricCounters = [] {
  CounterSet set = 0;
  for (int i = 0; i < kLayerGraph.num_counters; ++i) {
    const CounterRow& row = kLayerGraph.counters[i];
    if (region_of(row.of) == Region::kSymmetric) set |= bit_of(row.kind);
  }
  return set;
}();
constexpr UNIEP_HD bool is_symmetric(CounterKind kind) {
  return (kSymmetricCounters & bit_of(kind)) != 0;
}

/// The type of the layer's tensor `t`.
template <Tensor t>
using TypeOf = typename ElementOf<kLayerGraph[t].element>::Type;

}  // namespace uniep
