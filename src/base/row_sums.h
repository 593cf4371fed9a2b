#pragma once

#include <cstdint>

#include "base/math.h"
#include "uniep/bf16.h"

namespace uniep {

/// Rows of slots, which lie anywhere, and the sums of them that stage reduce makes of its own
/// (docs/numerics.md, "Combine groups"): out[t] = bf16(the sum over the combine groups of token t,
/// ascending, of the sum over its slots there, k ascending, of factor times row).
struct RowSums {
  std::int64_t tokens = 0;  // T
  std::int64_t hidden = 0;  // H, a multiple of 8
  int topk = 0;             // K, 1 to kMaxTopk
  int group_experts = 0;    // experts of a combine group; 0: all are one
  bool rounds = false;      // sums of groups, of which there are several, are rounded to bf16

  const std::int32_t* ids = nullptr;  // [T, K], numbers of experts; less than 0: left out
  const float* factors = nullptr;     // [T, K]; null: all are 1
  const std::int64_t* row = nullptr;  // [T, K]: which of `rows`, and behind them of `more`
  const bf16* rows = nullptr;         // [num_rows, H]
  const bf16* more = nullptr;         // [num_more, H]
  std::int64_t num_rows = 0, num_more = 0;
  bf16* out = nullptr;  // [T, H]

  /// The row of slot number t K + k; null if its number is that of none, and the sum is NaN.
  UNIEP_HD const bf16* row_of(std::int64_t slot) const {
    const std::int64_t i = row[slot];
    if (i < 0 || i >= num_rows + num_more) return nullptr;
    return i < num_rows ? rows + i * hidden : more + (i - num_rows) * hidden;
  }
};

}  // namespace uniep
