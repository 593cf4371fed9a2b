#pragma once

#include <cstdint>
#include <vector>

#include "schedule/row_blocks.h"

namespace uniep {

/// In which pieces rows come back between hosts: those of a block together. Where sums of combine
/// groups come back instead, a sum is in the piece of the last block that has a row of it. Both
/// ends find all of it from the routing of all ranks.
class Returns {
 public:
  /// `view` outlives this. Throws Error(kInvalidArgument) where a counter would rise too far in the
  /// pass.
  Returns(const PassView& view, const RowBlocks& blocks);

  // As HostTables has them.
  std::vector<ReturnedRow> returned;
  std::vector<std::int64_t> returned_begin;
  std::vector<std::int32_t> pushed_rows;
  std::vector<std::int32_t> coming_back;

 private:
  bool is_own(int source) const { return source == view_.rank; }
  /// Whether rows of `rank` for `source` go back by way of this rank.
  bool is_sent_here(int source, int rank) const {
    return view_.layout.relay(source, view_.layout.host_of(rank)) == view_.rank;
  }
  void count_push(int source, int rank, std::int32_t block);
  void check_counts() const;
  void add(int source, const ReturnedRow& row, int rank, std::int32_t piece);
  void list_returned();

  /// A row or sum for another host's rank of this rail, and the piece that takes it there.
  struct Item {
    int host;
    std::int32_t piece;
    ReturnedRow row;
  };

  const PassView& view_;
  std::vector<Item> items_;
};

}  // namespace uniep
