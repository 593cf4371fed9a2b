#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "base/math.h"

namespace uniep::testing {

/// A Problem::backward_rows with room for the expert of any rank that has most rows, the shared
/// ones with `shared_rows` among them, and `tiles` times row_align more.
inline std::int64_t ring_rows(std::span<const std::int32_t> topk_ids, int num_experts,
                              int row_align, std::int64_t tiles, std::int64_t shared_rows = 0) {
  std::vector<std::int64_t> rows(static_cast<std::size_t>(num_experts));
  for (const std::int32_t id : topk_ids) {
    if (id >= 0) ++rows[static_cast<std::size_t>(id)];
  }
  rows.push_back(shared_rows);
  const std::int64_t most = ceil_div<std::int64_t>(std::ranges::max(rows), row_align) + tiles;
  return std::max<std::int64_t>(most, 1) * row_align;
}

}  // namespace uniep::testing
