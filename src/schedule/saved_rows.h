#pragma once

#include "graph/layer_graph.h"
#include "schedule/row_ring.h"

namespace uniep {

/// Where tensors that are saved have the row: in its page, if the plan has pages.
inline UNIEP_HD std::int64_t saved_row(const PassView& v, std::int64_t row) {
  if (v.pages == nullptr) return row;
  const std::int32_t shift = v.page_shape.shift;
  return (std::int64_t{v.pages[row >> shift]} << shift) + (row & ((std::int64_t{1} << shift) - 1));
}

/// Whether this layer saves the tensor, and does not hold it for the call.
template <Tensor t>
UNIEP_HD bool is_saved(const PassView& v) {
  constexpr bool kMayBeSaved = kLayerGraph[t].lifetime == Lifetime::kSaved;
  constexpr When kWhen = kLayerGraph[t].when, kRemade = kLayerGraph[t].remade;
  if constexpr (!kMayBeSaved) return false;
  return holds(kWhen, v.choice) && !holds(kRemade, v.choice);
}

/// Where that tensor of rows has the row. Rows of one page follow one another, and pages do not
/// straddle a ring's end, so it is enough to ask for the first of a tile.
template <Tensor t>
UNIEP_HD std::int64_t row_in(const PassView& v, std::int64_t row) {
  return is_saved<t>(v) ? saved_row(v, row) : ring_row(v, row);
}

}  // namespace uniep
