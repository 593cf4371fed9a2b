#pragma once

#include <cstdint>
#include <vector>

#include "schedule/pass_view.h"

namespace uniep {

/// Which block an expert's row is in, of any rank's experts: found from the routing of all ranks.
/// Blocks are numbered alike on all ranks.
class RowBlocks {
 public:
  /// `view` has its schedule, sizes and tables of all ranks' routing, and outlives this.
  explicit RowBlocks(const PassView& view);

  /// The block of row number `row` of the expert.
  std::int32_t block(std::int32_t expert, std::int64_t row) const;

  /// Calls f(source, token, k, expert, block) for all rows of all ranks, by source and token.
  template <class F>
  void for_each_row(F&& f) const {
    std::vector<std::int64_t> next_row(rows_.size(), 0);
    for (int source = 0; source < view_.num_ranks; ++source) {
      for (std::int64_t token = 0; token < view_.tokens_of(source); ++token) {
        const std::int32_t* const ids = view_.ids_of(source, token);
        for (int k = 0; k < view_.topk; ++k) {
          if (ids[k] < 0) continue;
          const std::int64_t row = next_row[static_cast<std::size_t>(ids[k])]++;
          f(source, token, k, ids[k], block(ids[k], row));
        }
      }
    }
  }

 private:
  void count_rows();
  int start_of(std::size_t expert) const;
  void order_experts(int rank);

  const PassView& view_;
  std::vector<std::int64_t> rows_;        // [experts]
  std::vector<std::int64_t> first_tile_;  // [experts]
  std::vector<std::int32_t> position_;    // [experts]: among all of its rank's, shared ones too
};

}  // namespace uniep
