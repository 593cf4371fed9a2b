#pragma once

#include "graph/layer_graph.h"
#include "schedule/pass_view.h"

namespace uniep {

/// Sets what a pass knows of its layer's problem: sizes, arithmetic and choice.
void set_problem(PassView& view, const Problem& problem);

/// Works out what the graph says of the part of a pass that the view is of: its stages, what their
/// counters count up to, bytes on the wire. The view's sizes, schedule, pass, part
/// and the choice are set.
void set_stages(PassView& view, const Graph& graph = kLayerGraph);

/// What all stages of a pass move between ranks.
WireBytes wire_bytes(const Problem& problem, Pass pass, const Graph& graph = kLayerGraph);

}  // namespace uniep
