#include "graph/description.h"

#include <algorithm>

#include "base/check.h"

namespace uniep {
namespace {

const char* text_of(StageKind kind) {
  switch (kind) {
    case StageKind::kMove:
      return "move";
    case StageKind::kProduct:
      return "product";
    case StageKind::kSum:
      return "sum";
  }
  return "";
}

const char* text_of(StageSide side) {
  switch (side) {
    case StageSide::kLocal:
      return "local";
    case StageSide::kPull:
      return "pull";
    case StageSide::kPush:
      return "push";
    case StageSide::kRail:
      return "rail";
  }
  return "";
}

const char* text_of(TileGrid grid) {
  switch (grid) {
    case TileGrid::kNone:
      return "-";
    case TileGrid::kPulls:
      return "runs of pulls";
    case TileGrid::kRowTiles:
      return "tiles of rows";
    case TileGrid::kWeightTiles:
      return "tiles of a weight gradient";
    case TileGrid::kTokenBlocks:
      return "blocks of tokens";
    case TileGrid::kCrossings:
      return "tokens by block that needs them first, and host";
    case TileGrid::kReturns:
      return "rows by block that completes them, and host";
  }
  return "";
}

const char* text_of(CounterOf of) {
  switch (of) {
    case CounterOf::kSource:
      return "a rank: 1 when its tokens can be pulled";
    case CounterOf::kRowGroup:
      return "a group of rows: 1 a row";
    case CounterOf::kTile:
      return "a tile of rows: 1 a task on it";
    case CounterOf::kExpert:
      return "an expert: 1 a task on its tiles";
    case CounterOf::kExpertRows:
      return "an expert: 1 a row";
    case CounterOf::kExpertUses:
      return "an expert: 1 a task on its tiles or its weight gradients";
    case CounterOf::kTokenBlock:
      return "a block of tokens and a pushing rank: 1 an element";
    case CounterOf::kCrossing:
      return "a rank of another host, and a block: 1 a token that it needs first";
    case CounterOf::kPiece:
      return "rows of a block for another host's rank, and a pushing rank: 1 an element";
    case CounterOf::kReturn:
      return "a block of tokens and another host: 1 a row or sum that came back";
  }
  return "";
}

const char* text_of(Region region) {
  switch (region) {
    case Region::kCallers:
      return "the caller's";
    case Region::kLocal:
      return "local";
    case Region::kSymmetric:
      return "symmetric";
  }
  return "";
}

const char* text_of(Lifetime lifetime) {
  switch (lifetime) {
    case Lifetime::kCall:
      return "a call";
    case Lifetime::kSaved:
      return "saved by forward";
    case Lifetime::kLayer:
      return "the layer";
  }
  return "";
}

const char* text_of(When when) {
  switch (when) {
    case When::kAlways:
      return "always";
    case When::kNever:
      return "never";
    case When::kXRowsDropped:
      return "x_rows are not kept";
    case When::kReceivedDropped:
      return "nothing of x is kept";
    case When::kReceivedKept:
      return "tokens are kept, not x_rows";
    case When::kHDropped:
      return "h is not kept";
    case When::kHasBias:
      return "experts have biases";
    case When::kHasShared:
      return "experts are shared";
    case When::kInRing:
      return "backward has a ring of rows";
    case When::kHosts:
      return "there are several hosts";
    case When::kFp32Sums:
      return "fp32 sums of combine groups cross between hosts";
  }
  return "";
}

std::string held_for(const TensorRow& tensor) {
  std::string text = text_of(tensor.lifetime);
  if (tensor.remade != When::kNever) text += cat("; a call, if ", text_of(tensor.remade));
  if (tensor.when != When::kAlways) text += cat(", if ", text_of(tensor.when));
  return text;
}

/// Where it lies.
std::string place_of(const Graph& graph, const TensorRow& tensor) {
  if (tensor.over == Tensor::kNone) return text_of(tensor.region);
  const TensorRow& other = graph[tensor.over];
  return cat(text_of(tensor.region), "; over ", other.name, ", if ", text_of(other.remade));
}

const char* text_of(Extent extent) {
  switch (extent) {
    case Extent::kOne:
      return "1";
    case Extent::kHalves:
      return "2";
    case Extent::kTokens:
      return "T";
    case Extent::kTopk:
      return "K";
    case Extent::kShared:
      return "S";
    case Extent::kSlots:
      return "K + S";
    case Extent::kResultRows:
      return "1 or K";
    case Extent::kHidden:
      return "H";
    case Extent::kIntermediate:
      return "I";
    case Extent::kBothHalves:
      return "2I";
    case Extent::kRows:
      return "rows";
    case Extent::kReceived:
      return "received tokens";
    case Extent::kLocalExperts:
      return "E/ranks";
    case Extent::kDprobGroups:
      return "groups";
    case Extent::kRanks:
      return "ranks";
    case Extent::kTokenBlocks:
      return "token blocks";
    case Extent::kRowGroups:
      return "row groups";
    case Extent::kHosts:
      return "hosts";
  }
  return "";
}

std::string shape_text(const TensorRow& tensor) {
  std::string text;
  for (const Extent e : tensor.shape) {
    if (e != Extent::kOne) text += cat(text.empty() ? "" : ", ", text_of(e));
  }
  return cat('[', text, ']');
}

template <class List>
std::string joined(const List& names) {
  std::string text;
  for (const auto& name : names) text += cat(text.empty() ? "" : ", ", name);
  return text.empty() ? "-" : text;
}

std::vector<std::string> names_of(const Graph& graph, const TensorList& tensors) {
  std::vector<std::string> names;
  for (const Tensor t : tensors) names.emplace_back(graph[t].name);
  return names;
}

std::vector<std::string> names_of(const Graph& graph, CounterSet counters) {
  std::vector<std::string> names;
  for_each_counter(counters, [&](CounterKind kind) { names.emplace_back(graph[kind].name); });
  return names;
}

/// The stages, of both passes, of which `chosen(row)`.
template <class Chosen>
std::string stages_that(const Graph& graph, Chosen&& chosen) {
  std::vector<std::string> names;
  for (int i = 0; i < graph.num_stages; ++i) {
    const StageRow& row = graph.stages[i];
    if (chosen(row) && std::ranges::find(names, row.name) == names.end()) {
      names.emplace_back(row.name);
    }
  }
  return joined(names);
}

std::string waits_text(const Graph& graph, const StageRow& row) {
  const std::string text = joined(names_of(graph, row.waits));
  if (row.also_waits == 0) return text;
  return cat(text, "; of several ranks, if ", text_of(row.also_when), ", ",
             joined(names_of(graph, row.also_waits)));
}

}  // namespace

TextTable describe_stages(const Graph& graph, Pass pass) {
  TextTable table{
      {"stage", "if", "kind", "side", "tasks", "reads", "writes", "waits for", "signals"}, {}};
  graph.for_each_stage(pass, [&](const StageRow& row) {
    table.rows.push_back({row.name, text_of(row.when), text_of(row.kind), text_of(row.side),
                          text_of(row.grid), joined(names_of(graph, row.reads)),
                          joined(names_of(graph, row.writes)), waits_text(graph, row),
                          joined(names_of(graph, row.signals))});
  });
  return table;
}

TextTable describe_tensors(const Graph& graph) {
  TextTable table{{"tensor", "type", "shape", "region", "held for", "written by", "read by"}, {}};
  for (int i = 0; i < graph.num_tensors; ++i) {
    const TensorRow& t = graph.tensors[i];
    const auto writes = [&](const StageRow& row) { return row.writes.contains(t.tensor); };
    const auto reads = [&](const StageRow& row) { return row.reads.contains(t.tensor); };
    table.rows.push_back({t.name, name(t.element), shape_text(t), place_of(graph, t), held_for(t),
                          stages_that(graph, writes), stages_that(graph, reads)});
  }
  return table;
}

TextTable describe_counters(const Graph& graph) {
  TextTable table{{"counter", "one stands for", "lies", "signalled by", "waited for by"}, {}};
  for (int i = 0; i < graph.num_counters; ++i) {
    const CounterRow& c = graph.counters[i];
    const CounterSet bit = bit_of(c.kind);
    table.rows.push_back(
        {c.name,
         c.when == When::kAlways ? text_of(c.of) : cat(text_of(c.of), ", if ", text_of(c.when)),
         text_of(region_of(c.of)),
         stages_that(graph, [&](const StageRow& row) { return (row.signals & bit) != 0; }),
         stages_that(graph, [&](const StageRow& row) {
           return ((row.waits | row.also_waits) & bit) != 0;
         })});
  }
  return table;
}

std::string tensor_names(const Graph& graph, const std::function<bool(const TensorRow&)>& chosen) {
  std::vector<std::string> names;
  for (int i = 0; i < graph.num_tensors; ++i) {
    if (chosen(graph.tensors[i])) names.emplace_back(graph.tensors[i].name);
  }
  return joined(names);
}

std::string flowchart(const Graph& graph, Pass pass) {
  std::string text = "flowchart TD\n";
  std::vector<StageRow> stages;
  graph.for_each_stage(pass, [&](const StageRow& row) { stages.push_back(row); });
  for (const StageRow& row : stages) {
    const char* across = row.side == StageSide::kLocal ? "" : " (other ranks)";
    text += cat("  ", row.name, "[\"", row.name, across, "\"]\n");
  }
  for (std::size_t reader = 1; reader < stages.size(); ++reader) {
    for (std::size_t writer = 0; writer < reader; ++writer) {
      std::vector<std::string> moved;
      for (const Tensor t : stages[reader].reads) {
        if (stages[writer].writes.contains(t)) moved.emplace_back(graph[t].name);
      }
      if (moved.empty()) continue;
      text +=
          cat("  ", stages[writer].name, " -- ", joined(moved), " --> ", stages[reader].name, '\n');
    }
  }
  return text;
}

}  // namespace uniep
