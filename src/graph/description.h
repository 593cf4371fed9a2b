#pragma once

#include <functional>
#include <string>
#include <vector>

#include "graph/graph.h"

// The graph in words, for people: `uniep info` prints these tables, docs/graph.md shows
// them.

namespace uniep {

struct TextTable {
  std::vector<std::string> header;
  std::vector<std::vector<std::string>> rows;
};

TextTable describe_stages(const Graph& graph, Pass pass);
TextTable describe_tensors(const Graph& graph);
TextTable describe_counters(const Graph& graph);

/// The names of those tensors of which `chosen(row)`, with commas between.
std::string tensor_names(const Graph& graph, const std::function<bool(const TensorRow&)>& chosen);

/// A pass as a Mermaid flowchart: stages, and the tensors that go from one to another.
std::string flowchart(const Graph& graph, Pass pass);

}  // namespace uniep
