#include "schedule/returns.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "base/check.h"
#include "schedule/constraints.h"

namespace uniep {
namespace {

/// Sums by source, token and number of the combine group: its first slot and last block.
struct Sum {
  std::int32_t slot = 0;
  std::int32_t last_block = 0;
  int rank = 0;  // one that has rows of it
};
using Sums = std::map<std::tuple<int, std::int64_t, std::int32_t>, Sum>;

void note_row_of_sum(Sums& sums, const std::tuple<int, std::int64_t, std::int32_t>& key, int slot,
                     int rank, std::int32_t block) {
  const auto [entry, is_new] = sums.try_emplace(key, Sum{slot, block, rank});
  if (!is_new) entry->second.last_block = std::max(entry->second.last_block, block);
}

}  // namespace

Returns::Returns(const PassView& view, const RowBlocks& blocks) : view_(view) {
  const RankLayout& layout = view.layout;
  pushed_rows.assign(
      static_cast<std::size_t>(layout.hosts * view.num_pieces() * layout.local_ranks), 0);
  coming_back.assign(static_cast<std::size_t>(view.num_token_blocks() * layout.hosts), 0);
  Sums sums;
  blocks.for_each_row(
      [&](int source, std::int64_t token, int k, std::int32_t expert, std::int32_t block) {
        const int rank = view.rank_of_expert(expert);
        if (layout.same_host(source, rank)) return;
        count_push(source, rank, block);
        if (!view.choice.sums_cross) {
          add(source, {static_cast<std::int32_t>(token), k}, rank, block);
        } else if (is_own(source) || is_sent_here(source, rank)) {  // of all ranks: gigabytes
          note_row_of_sum(sums, {source, token, expert / view.group_experts}, k, rank, block);
        }
      });
  check_counts();
  for (const auto& [key, sum] : sums) {
    const auto [source, token, group] = key;
    add(source, {static_cast<std::int32_t>(token), sum.slot}, sum.rank, sum.last_block);
  }
  list_returned();
}

/// Counts a row that a rank makes for a rank of another host.
void Returns::count_push(int source, int rank, std::int32_t block) {
  const RankLayout& layout = view_.layout;
  if (!layout.same_host(rank, view_.rank)) return;
  if (layout.local_of(source) != layout.local_of(view_.rank)) return;
  const std::int64_t piece = std::int64_t{layout.host_of(source)} * view_.num_pieces() + block;
  ++pushed_rows[static_cast<std::size_t>(piece * layout.local_ranks + layout.local_of(rank))];
}

/// Only the routing says how many rows of a rank's tokens a block has: far fewer than could be.
void Returns::check_counts() const {
  const std::int64_t most = kMaxCount / view_.hidden;
  for (const std::int64_t rows : pushed_rows) {
    require(rows <= most, ErrorCode::kInvalidArgument, "one rank's tokens have ", rows,
            " rows for one expert of another host in a wave; with hidden=", view_.hidden, " ", most,
            " are accepted (counter pushed has 32 bits): fewer tokens in a call, or more waves");
  }
}

/// What comes back to `source` from the host of `rank`.
void Returns::add(int source, const ReturnedRow& row, int rank, std::int32_t piece) {
  const RankLayout& layout = view_.layout;
  if (is_own(source)) {
    const std::int64_t block = row.token / view_.schedule.token_block;
    ++coming_back[static_cast<std::size_t>(block * layout.hosts + layout.host_of(rank))];
  }
  if (is_sent_here(source, rank)) {
    items_.push_back({layout.host_of(source), piece, row});
  }
}

/// Lists what goes back. In a piece tokens ascend, so that those of a token block are neighbours.
void Returns::list_returned() {
  std::ranges::stable_sort(items_, {}, [](const Item& i) { return std::pair(i.host, i.piece); });
  auto item = items_.begin();
  for (int host = 0; host < view_.layout.hosts; ++host) {
    for (std::int32_t piece = 0; piece < view_.num_pieces(); ++piece) {
      returned_begin.push_back(static_cast<std::int64_t>(returned.size()));
      for (; item != items_.end() && item->host == host && item->piece == piece; ++item) {
        returned.push_back(item->row);
      }
    }
  }
  returned_begin.push_back(static_cast<std::int64_t>(returned.size()));
  items_.clear();
}

}  // namespace uniep
