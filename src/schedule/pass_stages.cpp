#include "schedule/pass_stages.h"

#include <algorithm>
#include <initializer_list>

#include "base/check.h"
#include "graph/extents.h"

namespace uniep {
namespace {

bool is_in_part(PassPart part, StagePlace place) {
  switch (part) {
    case PassPart::kWhole:
      return true;
    case PassPart::kData:
      return place != StagePlace::kWeights;
    case PassPart::kWeights:
      return place == StagePlace::kWeights;
  }
  return false;
}

/// Bytes of a tensor for each unit of what its shape counts, the extents of `counted`.
std::int64_t unit_bytes(const TensorRow& t, const Extents& extents,
                        std::initializer_list<Extent> counted) {
  std::int64_t bytes = bytes_of(t.element);
  for (const Extent e : t.shape) {
    if (std::ranges::find(counted, e) == counted.end()) bytes *= extents[e];
  }
  return bytes;
}

/// What a task that moves data stores for each row, and what one that adds rows up also reads for
/// each token; numbers that go with a row, and tokens that are kept, aside.
std::int64_t moved_bytes(const Graph& graph, const StageRow& row, const Extents& extents,
                         GraphChoice choice) {
  std::int64_t bytes = 0;
  const auto count = [&](Tensor tensor) {
    const TensorRow& t = graph[tensor];
    if (!holds(t.when, choice)) return;
    if (!has_extent(t, row.cols) || has_extent(t, Extent::kReceived)) return;
    bytes += unit_bytes(t, extents, {Extent::kRows, Extent::kTokens});
  };
  for (const Tensor t : row.writes) count(t);
  if (row.kind != StageKind::kSum) return bytes;
  for (const Tensor t : row.reads) count(t);
  return bytes;
}

/// What it also stores for each token that it pulls.
std::int64_t kept_bytes(const Graph& graph, const StageRow& row, const Extents& extents,
                        GraphChoice choice) {
  std::int64_t bytes = 0;
  for (const Tensor tensor : row.writes) {
    const TensorRow& t = graph[tensor];
    if (!has_extent(t, Extent::kReceived) || !holds(t.when, choice)) continue;
    bytes += unit_bytes(t, extents, {Extent::kReceived});
  }
  return bytes;
}

CounterSet waits_of(const StageRow& row, const PassView& v) {
  const bool more = v.num_ranks > 1 && holds(row.also_when, v.choice);
  return more ? static_cast<CounterSet>(row.waits | row.also_waits) : row.waits;
}

StageView view_of(const Graph& graph, const StageRow& row, const Extents& extents,
                  const PassView& v) {
  const Schedule& s = v.schedule;
  const auto size = [&](Extent e) { return static_cast<std::int32_t>(extents[e]); };
  StageView view{.kind = row.kind,
                 .side = row.side,
                 .grid = row.grid,
                 .place = row.place,
                 .like = row.like == Stage::kPlan ? row.stage : row.like,
                 .waits = waits_of(row, v),
                 .signals = row.signals};
  const auto halves = min_of<std::int64_t>(row.halves, extents[Extent::kHalves]);
  view.halves = static_cast<std::uint8_t>(halves);
  if (row.kind == StageKind::kProduct) {
    const Tensor of[] = {row.reads[0], row.reads[1], row.writes[0]};
    for (int i = 0; i < 3; ++i) {
      view.element_bytes[i] = static_cast<std::uint8_t>(bytes_of(graph[of[i]].element));
    }
  } else {
    view.unit_bytes = static_cast<std::int32_t>(moved_bytes(graph, row, extents, v.choice));
    view.pull_bytes = static_cast<std::int32_t>(kept_bytes(graph, row, extents, v.choice));
  }
  const bool of_weights = row.grid == TileGrid::kWeightTiles;
  if (row.grid != TileGrid::kRowTiles && !of_weights) return view;
  view.rows = of_weights ? size(row.rows) : 0;
  view.cols = size(row.cols);
  view.tile_cols = s.tile_n / static_cast<int>(halves);
  view.reduction = row.reduction == Extent::kRows ? 0 : size(row.reduction);
  view.column_tiles = static_cast<std::uint32_t>(ceil_div(view.cols, view.tile_cols));
  return view;
}

/// What a stage adds to one counter for each unit that it stands for.
std::uint32_t signalled(CounterOf of, const StageView& stage) {
  switch (of) {
    case CounterOf::kSource:
    case CounterOf::kRowGroup:
    case CounterOf::kExpertRows:
      return 1;
    case CounterOf::kTile:
    case CounterOf::kExpert:
    case CounterOf::kExpertUses:
      return stage.column_tiles;
    case CounterOf::kTokenBlock:
    case CounterOf::kPiece:
      return static_cast<std::uint32_t>(stage.cols);
    case CounterOf::kCrossing:
    case CounterOf::kReturn:
      return 1;
  }
  return 0;
}

/// What any stage of the pass waits for.
CounterSet waited_for(const Graph& graph, const PassView& v) {
  CounterSet all = 0, held = 0;
  for (int i = 0; i < graph.num_counters; ++i) {
    if (holds(graph.counters[i].when, v.choice)) held |= bit_of(graph.counters[i].kind);
  }
  graph.for_each_stage(v.pass, [&](const StageRow& row) {
    if (holds(row.when, v.choice)) all = static_cast<CounterSet>(all | waits_of(row, v));
  });
  return all & held;
}

void count_signals(PassView& v, const StageView& stage) {
  for_each_counter(stage.signals, [&](CounterKind kind) {
    CounterView& counter = v.counters[static_cast<int>(kind)];
    if (stage.grid == TileGrid::kWeightTiles) {
      const auto tile_m = static_cast<std::uint32_t>(v.schedule.tile_m);
      counter.per_expert +=
          ceil_div(static_cast<std::uint32_t>(stage.rows), tile_m) * stage.column_tiles;
    } else {
      counter.per_unit += signalled(counter.of, stage);
    }
  });
}

/// Peers pull what a stage reads of symmetric memory, and push to what it writes there. What has a
/// number for each slot of a token goes with the token's rows.
void count_wire_bytes(WireBytes& wire, const Graph& graph, const StageRow& row,
                      const Extents& extents) {
  const auto bytes = [&](const TensorRow& t, std::initializer_list<Extent> counted) {
    return static_cast<std::int32_t>(unit_bytes(t, extents, counted));
  };
  const auto of_row = [&](const TensorRow& t) {
    return bytes(t, {Extent::kTokens, Extent::kSlots});
  };
  if (row.side == StageSide::kPull) {
    for (const Tensor tensor : row.reads) {
      const TensorRow& t = graph[tensor];
      if (t.region != Region::kSymmetric) continue;
      (has_extent(t, Extent::kSlots) ? wire.pulled_row : wire.pulled_token) += of_row(t);
    }
  }
  if (row.side == StageSide::kPush) {
    for (const Tensor tensor : row.writes) {
      const TensorRow& t = graph[tensor];
      if (t.region != Region::kSymmetric) continue;
      if (has_extent(t, row.cols)) {
        wire.pushed_element += bytes(t, {Extent::kTokens, Extent::kSlots, row.cols});
      } else {
        wire.pushed_row += of_row(t);
      }
    }
  }
}

}  // namespace

void set_problem(PassView& view, const Problem& problem) {
  view.choice = choice_of(problem, view.layout.hosts);
  view.activation = problem.activation;
  view.probs = problem.probs;
  view.group_experts =
      problem.combine_groups > 1 ? problem.num_experts / problem.combine_groups : 0;
  view.combine_partials = problem.combine_partials;
  view.ring_rows =
      view.pass == Pass::kBackward ? static_cast<std::int32_t>(problem.backward_rows) : 0;
  view.topk = problem.topk;
  view.slots = slots(problem);
  view.shared_experts = problem.shared_experts;
  view.shared_gate = problem.shared_gate;
  view.slot_rows = problem.slot_rows;
  view.hidden = problem.hidden;
  view.intermediate = problem.intermediate;
  view.page_shape = page_shape(problem);
  view.gathered_hosts = problem.gathered_hosts;
  view.first_host = problem.first_host;
  view.most_tokens = problem.max_tokens;
}

WireBytes wire_bytes(const Problem& problem, Pass pass, const Graph& graph) {
  PassView sizes;
  sizes.pass = pass;
  set_problem(sizes, problem);
  set_stages(sizes, graph);
  WireBytes all;
  for (const StageView& stage : sizes.stages) {
    all.pulled_token += stage.wire.pulled_token;
    all.pulled_row += stage.wire.pulled_row;
    all.pushed_element += stage.wire.pushed_element;
    all.pushed_row += stage.wire.pushed_row;
  }
  return all;
}

void set_stages(PassView& v, const Graph& graph) {
  // Those of memory are not asked for.
  const Extents extents = extents_of_widths(v.topk, v.shared_experts, v.hidden, v.intermediate,
                                            v.halves(), v.choice.has_bias, v.result_rows());
  v.num_stages = v.num_data_stages = v.num_weight_stages = 0;
  for (StageView& stage : v.stages) stage = {};
  const CounterSet waited = waited_for(graph, v);
  for (int i = 0; i < graph.num_counters; ++i) v.counters[i] = {.of = graph.counters[i].of};
  graph.for_each_stage(v.pass, [&](const StageRow& row) {
    if (!holds(row.when, v.choice)) return;
    const bool queued = row.grid != TileGrid::kNone;
    if (queued) ++(row.place == StagePlace::kWeights ? v.num_weight_stages : v.num_data_stages);
    if (!is_in_part(v.part, row.place)) return;
    const auto number = static_cast<std::int8_t>(row.stage);
    ensure(number < kMaxStages, "a graph has stage number ", int{number});
    StageView& stage = v.stages[number] = view_of(graph, row, extents, v);
    stage.signals = static_cast<CounterSet>(stage.signals & waited);
    stage.waits = static_cast<CounterSet>(stage.waits & waited);
    count_signals(v, stage);
    count_wire_bytes(stage.wire, graph, row, extents);
    if (queued) v.stage_order[v.num_stages++] = number;
  });
}

}  // namespace uniep
