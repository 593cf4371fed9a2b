#include "info/graph_info.h"

#include <ostream>
#include <utility>

#include "common/table.h"
#include "graph/description.h"
#include "graph/layer_graph.h"

namespace uniep::tool {
namespace {

/// A table of those columns of the text, in this order.
Table columns_of(const TextTable& text, const std::vector<std::size_t>& columns) {
  const auto chosen = [&](const std::vector<std::string>& cells) {
    std::vector<std::string> few;
    for (const std::size_t c : columns) few.push_back(cells[c]);
    return few;
  };
  Table table(std::vector<Table::Align>(columns.size(), Table::Align::kLeft));
  table.header(chosen(text.header));
  for (const auto& row : text.rows) table.row(chosen(row));
  return table;
}

}  // namespace

void print_graph(std::ostream& out) {
  for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
    out << "#\n# stages of the " << name(pass) << " pass\n"
        << columns_of(describe_stages(kLayerGraph, pass), {0, 1, 3, 6, 7});
  }
  out << "#\n# tensors (T tokens, K top-k, H hidden, I intermediate, E experts)\n"
      << columns_of(describe_tensors(kLayerGraph), {0, 1, 2, 3, 4})
      << "#\n# counters: what one of a kind stands for, and what a task adds\n"
      << columns_of(describe_counters(kLayerGraph), {0, 2, 1});
}

}  // namespace uniep::tool
