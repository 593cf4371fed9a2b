#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "support/random_case.h"
#include "support/slot_rows.h"
#include "uniep/c_api.h"

namespace uniep::testing {

/// Rows of slots that lie in disorder in two places, and their sums.
struct RowSumsCase {
  LayerData layer;  // whose rows they could be
  std::vector<bf16> rows, more;
  std::vector<std::int64_t> row;
  std::vector<bf16> sums;

  explicit RowSumsCase(Rng& rng) {
    LayerData& d = layer;
    d.tokens = pick(rng, 0, 40);
    d.hidden = 8 * pick(rng, 1, 300);
    d.topk = static_cast<int>(pick(rng, 1, kMaxTopk));
    d.num_experts = static_cast<int>(pick(rng, 1, 24));
    do {
      d.combine_groups = static_cast<int>(pick(rng, 1, d.num_experts));
    } while (d.num_experts % d.combine_groups != 0);
    d.combine_partials = chance(rng, 50) ? CombinePartials::kFp32 : CombinePartials::kBf16;
    d.probs = chance(rng, 50) ? Probs::kBefore : Probs::kAfter;
    const std::int64_t slots = d.tokens * d.topk;
    std::vector<bf16> in_order = random_bf16(rng, slots * d.hidden, 1);
    // Some of them large, so that the order of sums shows.
    for (bf16& v : in_order) v = chance(rng, 10) ? to_bf16(to_float(v) * 1e6f) : v;
    std::vector<std::int64_t> order(static_cast<std::size_t>(slots));
    std::iota(order.begin(), order.end(), 0);
    std::ranges::shuffle(order, rng);
    row.resize(order.size());
    std::vector<bf16> lying(in_order.size());
    const auto width = static_cast<std::size_t>(d.hidden);
    for (std::size_t slot = 0; slot < order.size(); ++slot) {
      d.topk_ids.push_back(static_cast<std::int32_t>(pick(rng, -1, d.num_experts - 1)));
      d.topk_probs.push_back(
          std::ldexp(chance(rng, 50) ? -1.3f : 1.1f, static_cast<int>(slot % 5)));
      row[slot] = order[slot];
      const auto from = std::span(in_order).subspan(slot * width, width);
      std::ranges::copy(from, lying.begin() + order[slot] * d.hidden);
      if (d.topk_ids.back() >= 0) continue;
      std::ranges::fill(from, bf16{});
      if (chance(rng, 50)) row[slot] = -1;  // and is not read where it lies
    }
    const auto in_first = static_cast<std::ptrdiff_t>(pick(rng, 0, slots) * d.hidden);
    rows.assign(lying.begin(), lying.begin() + in_first);
    more.assign(lying.begin() + in_first, lying.end());
    sums = sums_of(d, in_order, d.probs == Probs::kAfter);
  }

  /// All but what is written.
  uniep_rows_call call() const {
    uniep_rows_call c{};
    c.tokens = layer.tokens;
    c.hidden = layer.hidden;
    c.topk = layer.topk;
    c.num_experts = layer.num_experts;
    c.combine_groups = layer.combine_groups;
    c.combine_partials = layer.combine_partials == CombinePartials::kBf16 ? 1 : 0;
    c.ids = layer.topk_ids.data();
    c.factors = layer.probs == Probs::kAfter ? layer.topk_probs.data() : nullptr;
    c.row = row.data();
    c.rows = rows.data();
    c.more = more.data();
    c.num_rows = static_cast<std::int64_t>(rows.size()) / layer.hidden;
    c.num_more = static_cast<std::int64_t>(more.size()) / layer.hidden;
    return c;
  }
};

}  // namespace uniep::testing
