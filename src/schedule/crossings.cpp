#include "schedule/crossings.h"

#include <algorithm>
#include <numeric>

#include "schedule/tile_order.h"

namespace uniep {
namespace {

/// Which block an expert's row is in, of any rank's experts.
class RowBlocks {
 public:
  RowBlocks(const PlanData& plan, const PassView& view) : view_(view) {
    const auto experts = static_cast<std::size_t>(plan.problem.num_experts);
    rows_.assign(experts, 0);
    first_tile_.assign(experts, 0);
    count_rows();
    for (int rank = 0; rank < view.num_ranks; ++rank) order_experts(rank);
  }

  /// The block of row number `row` of the expert.
  std::int32_t block(std::int32_t expert, std::int64_t row) const {
    const auto e = static_cast<std::size_t>(expert);
    const std::int64_t count = ceil_div<std::int64_t>(rows_[e], view_.schedule.tile_m);
    const std::int64_t tile = row / view_.schedule.tile_m;
    const int wave = wave_of(view_, count, place_of_tile(tile, first_tile_[e], count));
    return wave * view_.num_local_experts + slot_[e];
  }

 private:
  /// Rows of every expert, and the tile that holds the first one from the starting source or later.
  void count_rows() {
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

  int start_of(std::size_t expert) const {
    PassView owner = view_;
    owner.rank = view_.rank_of_expert(static_cast<std::int32_t>(expert));
    return starting_source(owner);
  }

  void order_experts(int rank) {
    slot_.resize(rows_.size());
    const int first = rank * view_.num_local_experts;
    std::vector<std::int32_t> order(static_cast<std::size_t>(view_.num_local_experts));
    std::iota(order.begin(), order.end(), 0);
    const auto rows = [&](std::int32_t e) { return rows_[static_cast<std::size_t>(first + e)]; };
    std::ranges::sort(order, [&](std::int32_t a, std::int32_t b) {
      return stands_before(view_, rows(a), a, rows(b), b);
    });
    for (std::size_t slot = 0; slot < order.size(); ++slot) {
      slot_[static_cast<std::size_t>(first + order[slot])] = static_cast<std::int32_t>(slot);
    }
  }

  const PassView& view_;
  std::vector<std::int64_t> rows_;
  std::vector<std::int64_t> first_tile_;
  std::vector<std::int32_t> slot_;  // in its rank's order
};

}  // namespace

Crossings::Crossings(const PlanData& plan, const PassView& view) : view_(view) {
  pieces_.assign(static_cast<std::size_t>(view.first_token[view.num_ranks]), -1);
  pieces_there_.assign(static_cast<std::size_t>(view.layout.hosts * view.tokens), -1);
  const RowBlocks blocks(plan, view);
  std::vector<std::int64_t> next_row(static_cast<std::size_t>(plan.problem.num_experts), 0);
  for (int source = 0; source < view.num_ranks; ++source) {
    for (std::int64_t token = 0; token < view.tokens_of(source); ++token) {
      const std::int32_t* const ids = view.ids_of(source, token);
      for (int k = 0; k < view.topk; ++k) {
        if (ids[k] < 0) continue;
        const std::int64_t row = next_row[static_cast<std::size_t>(ids[k])]++;
        const int host = view.layout.host_of(view.rank_of_expert(ids[k]));
        note(source, token, host, blocks.block(ids[k], row));
      }
    }
  }
  list_sent_tokens();
}

void Crossings::note(int source, std::int64_t token, int host, std::int32_t piece) {
  if (view_.layout.host_of(source) == host) return;
  const auto keep_first = [&](std::int32_t& kept) {
    kept = kept < 0 ? piece : std::min(kept, piece);
  };
  if (host == view_.layout.host_of(view_.rank)) {
    keep_first(pieces_[static_cast<std::size_t>(view_.first_token[source] + token)]);
  }
  if (source == view_.rank) {
    keep_first(pieces_there_[static_cast<std::size_t>(host * view_.tokens + token)]);
  }
}

void Crossings::list_sent_tokens() {
  sent_begin.push_back(0);
  for (int host = 0; host < view_.layout.hosts; ++host) {
    const auto first = pieces_there_.begin() + host * view_.tokens;
    std::vector<std::vector<std::int32_t>> by_piece(static_cast<std::size_t>(view_.num_pieces()));
    for (std::int64_t token = 0; token < view_.tokens; ++token) {
      if (first[token] < 0) continue;
      by_piece[static_cast<std::size_t>(first[token])].push_back(static_cast<std::int32_t>(token));
    }
    for (const auto& tokens : by_piece) {
      sent_tokens.insert(sent_tokens.end(), tokens.begin(), tokens.end());
      sent_begin.push_back(static_cast<std::int64_t>(sent_tokens.size()));
    }
  }
}

}  // namespace uniep
