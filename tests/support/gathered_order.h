#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "base/layer_data.h"
#include "base/math.h"

namespace uniep::testing {

/// The layer with its tokens in the canonical order of ranks that have [token_begin[r],
/// token_begin[r + 1]) of them, gathered of so many hosts: host by host, and there rank by rank, a
/// rank's share of its blocks. Only weight gradients of such ranks differ from those of others.
inline LayerData in_gathered_order(const LayerData& d, const std::vector<std::int64_t>& token_begin,
                                   int hosts) {
  const std::size_t ranks = token_begin.size() - 1;
  std::int64_t most = 0;
  for (std::size_t r = 0; r < ranks; ++r) {
    most = std::max(most, token_begin[r + 1] - token_begin[r]);
  }
  const std::int64_t block = ceil_div<std::int64_t>(most, hosts);
  LayerData ordered = d;
  std::int64_t next = 0;
  const auto move = [&](const auto& from, auto& to, std::int64_t width, std::int64_t token) {
    if (from.empty()) return;
    std::copy_n(from.begin() + token * width, width, to.begin() + next * width);
  };
  for (int host = 0; host < hosts; ++host) {
    for (std::size_t r = 0; r < ranks; ++r) {
      const std::int64_t end = std::min(token_begin[r] + (host + 1) * block, token_begin[r + 1]);
      for (std::int64_t t = token_begin[r] + host * block; t < end; ++t) {
        move(d.x, ordered.x, d.hidden, t);
        move(d.dy, ordered.dy, d.hidden, t);
        move(d.topk_ids, ordered.topk_ids, d.topk, t);
        move(d.topk_probs, ordered.topk_probs, d.topk, t);
        move(d.shared_probs, ordered.shared_probs, d.shared_experts, t);
        ++next;
      }
    }
  }
  return ordered;
}

/// Those of experts that are not shared.
inline void take_weight_grads(LayerResult& from, LayerResult& to) {
  to.dw1 = std::move(from.dw1);
  to.dw2 = std::move(from.dw2);
  to.db1 = std::move(from.db1);
  to.db2 = std::move(from.db2);
  to.main_dw1 = std::move(from.main_dw1);
  to.main_dw2 = std::move(from.main_dw2);
  to.main_db1 = std::move(from.main_db1);
  to.main_db2 = std::move(from.main_db2);
}

}  // namespace uniep::testing
