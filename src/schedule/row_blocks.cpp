#include "schedule/row_blocks.h"

#include <algorithm>
#include <numeric>

#include "schedule/tile_order.h"

namespace uniep {

RowBlocks::RowBlocks(const PassView& view) : view_(view) {
  const auto experts = static_cast<std::size_t>(view.num_ranks * view.routed_experts());
  rows_.assign(experts, 0);
  first_tile_.assign(experts, 0);
  position_.resize(experts);
  count_rows();
  for (int rank = 0; rank < view.num_ranks; ++rank) order_experts(rank);
}

std::int32_t RowBlocks::block(std::int32_t expert, std::int64_t row) const {
  const auto e = static_cast<std::size_t>(expert);
  const std::int64_t count = ceil_div<std::int64_t>(rows_[e], view_.schedule.tile_m);
  const std::int64_t tile = row / view_.schedule.tile_m;
  const int wave = wave_of(view_, count, place_of_tile(tile, first_tile_[e], count));
  return wave * view_.num_local_experts + position_[e];
}

/// Rows of every expert, and the tile that holds the first one from the starting source or later.
void RowBlocks::count_rows() {
  std::vector<std::int64_t> before(rows_.size(), -1);  // the starting source
  for (int source = 0; source < view_.num_ranks; ++source) {
    for (std::size_t e = 0; e < rows_.size(); ++e) {
      if (start_of(e) == source) before[e] = rows_[e];
    }
    const std::int32_t* const end = view_.ids_of(source, view_.tokens_of(source));
    for (const std::int32_t* id = view_.ids_of(source, 0); id != end; ++id) {
      if (*id >= 0) ++rows_[static_cast<std::size_t>(*id)];
    }
  }
  for (std::size_t e = 0; e < rows_.size(); ++e) {
    first_tile_[e] = before[e] < rows_[e] ? before[e] / view_.schedule.tile_m : 0;
  }
}

int RowBlocks::start_of(std::size_t expert) const {
  PassView owner = view_;
  owner.rank = view_.rank_of_expert(static_cast<std::int32_t>(expert));
  return starting_source(owner);
}

void RowBlocks::order_experts(int rank) {
  const int first = rank * view_.routed_experts();
  std::vector<std::int32_t> order(static_cast<std::size_t>(view_.num_local_experts));
  std::iota(order.begin(), order.end(), 0);
  const auto rows = [&](std::int32_t e) {
    return view_.is_shared(e) ? view_.tokens_of(rank) : rows_[static_cast<std::size_t>(first + e)];
  };
  std::ranges::sort(order, [&](std::int32_t a, std::int32_t b) {
    return stands_before(view_, rows(a), a, rows(b), b);
  });
  for (std::size_t i = 0; i < order.size(); ++i) {
    if (view_.is_shared(order[i])) continue;
    position_[static_cast<std::size_t>(first + order[i])] = static_cast<std::int32_t>(i);
  }
}

}  // namespace uniep
