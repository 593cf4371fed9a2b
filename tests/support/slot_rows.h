#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "base/layer_data.h"
#include "workload/split.h"

namespace uniep::testing {

/// out and dx of Problem::slot_rows, [T, K, H] of all ranks, full of NaNs at first.
struct SlotRows {
  explicit SlotRows(const LayerData& data)
      : out(static_cast<std::size_t>(data.tokens * data.topk * data.hidden), bf16{0x7fff}),
        dx(out) {}

  /// Those of a rank's tokens.
  static std::span<bf16> of_rank(std::vector<bf16>& rows, const LayerData& data,
                                 const workload::Split& split, int rank) {
    const auto width = static_cast<std::size_t>(data.topk * data.hidden);
    const auto tokens = split.tokens(rank);
    return std::span(rows).subspan(static_cast<std::size_t>(tokens.begin) * width,
                                   static_cast<std::size_t>(tokens.size()) * width);
  }

  std::vector<bf16> out, dx;
};

/// The sums of such rows that the layer's own arithmetic has: of a token's combine groups,
/// ascending, each that of its slots, k ascending; `weighted`: of products with probabilities.
/// Rows of dropped slots have to be 0.
inline std::vector<bf16> sums_of(const LayerData& d, std::span<const bf16> rows, bool weighted) {
  const int group_experts = d.num_experts / d.combine_groups;
  const bool rounds = d.combine_groups > 1 && d.combine_partials == CombinePartials::kBf16;
  std::vector<bf16> sums;
  bool zeros = true;
  for (std::int64_t t = 0; t < d.tokens; ++t) {
    std::map<int, std::vector<std::int64_t>> groups;
    for (std::int64_t slot = t * d.topk; slot < (t + 1) * d.topk; ++slot) {
      const std::int32_t expert = d.topk_ids[static_cast<std::size_t>(slot)];
      if (expert >= 0) groups[expert / group_experts].push_back(slot);
      const auto row = rows.subspan(static_cast<std::size_t>(slot * d.hidden),
                                    static_cast<std::size_t>(d.hidden));
      zeros &= expert >= 0 || std::ranges::all_of(row, [](bf16 v) { return v.bits == 0; });
    }
    for (std::int64_t c = 0; c < d.hidden; ++c) {
      float sum = 0;
      for (const auto& [group, slots] : groups) {
        float part = 0;
        for (const std::int64_t slot : slots) {
          const float value = to_float(rows[static_cast<std::size_t>(slot * d.hidden + c)]);
          const float p = weighted ? d.topk_probs[static_cast<std::size_t>(slot)] : 1.0f;
          const float product = p * value;
          part += product;
        }
        sum += rounds ? to_float(to_bf16(part)) : part;
      }
      sums.push_back(to_bf16(sum));
    }
  }
  EXPECT_TRUE(zeros) << "rows of dropped slots are not 0";
  return sums;
}

}  // namespace uniep::testing
