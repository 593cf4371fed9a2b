#include "schedule/pass_order.h"

#include <algorithm>
#include <numeric>

#include "schedule/open_sizes.h"
#include "schedule/tile_order.h"
#include "schedule/tokens_in_place.h"

namespace uniep {

PassOrder::PassOrder(const PlanData& plan, Pass pass, const Schedule& schedule, PassPart part,
                     const Graph& graph)
    : plan_(plan) {
  view_.pass = pass;
  view_.part = part;
  view_.schedule = schedule_of_pass(schedule, plan.problem, pass);
  view_.layout = plan.layout;
  set_problem(view_, plan.problem);
  view_.rank = plan.rank;
  view_.num_ranks = plan.num_ranks();
  view_.num_local_experts = plan.num_local_experts;
  view_.tokens = plan.tokens();
  view_.segment_begin = plan.segment_begin.data();
  view_.tokens_per_expert = plan.tokens_per_expert.data();
  view_.topk_ids = plan.topk_ids.data();
  view_.row_origin = plan.row_origin.data();
  view_.pull_rows = plan.pull_rows.data();
  view_.pages = plan.pages;
  view_.pull_of_row = plan.pull_of_row.data();

  set_stages(view_, graph);
  set_token_waves(view_);
  if (view_.has_hosts()) set_hosts();
  order_experts();
  count_dispatched();
  order_tiles();
  order_pulls();
  count_slots();
  if (view_.has_hosts()) order_crossings();
}

/// A plan with a fault knows no routing: as if nobody had tokens.
void PassOrder::set_hosts() {
  first_token_.push_back(0);
  const bool has_routing = plan_.fault.kind == RoutingFault::Kind::kNone;
  for (const std::int64_t tokens : plan_.tokens_per_rank) {
    first_token_.push_back(first_token_.back() + (has_routing ? tokens : 0));
  }
  across_.first_token = first_token_.data();
  across_.all_topk_ids = plan_.all_topk_ids.data();
  view_.across = &across_;
}

void PassOrder::order_crossings() {
  const RowBlocks blocks(view_);
  crossings_.emplace(view_, blocks);
  returns_.emplace(view_, blocks);
  for (const Pull& pull : pulls_) {
    crossing_.push_back(view_.is_here(pull.source) ? -1
                                                   : crossings_->piece(pull.source, pull.token));
  }
  across_.crossing = crossing_.data();
  across_.crossing_tokens = crossings_->crossing_tokens.data();
  across_.sent_tokens = crossings_->sent_tokens.data();
  across_.sent_begin = crossings_->sent_begin.data();
  across_.returned = returns_->returned.data();
  across_.returned_begin = returns_->returned_begin.data();
  across_.pushed_rows = returns_->pushed_rows.data();
  across_.coming_back = returns_->coming_back.data();
}

void PassOrder::order_experts() {
  expert_order_.resize(static_cast<std::size_t>(plan_.num_local_experts));
  std::iota(expert_order_.begin(), expert_order_.end(), 0);
  const auto rows = [&](std::int32_t e) {
    return plan_.tokens_per_expert[static_cast<std::size_t>(e)];
  };
  std::ranges::sort(expert_order_, [&](std::int32_t a, std::int32_t b) {
    return stands_before(view_, rows(a), a, rows(b), b);
  });
  view_.expert_order = expert_order_.data();
}

namespace {

/// Index of the tile, within the expert, that holds the first row of this token or a later one.
std::int64_t first_tile_from(const PassView& view, int expert, std::int64_t token) {
  const std::int64_t row = first_row_from(view, expert, token);
  return row == view.tokens_per_expert[expert] ? 0 : row / view.schedule.tile_m;
}

std::int64_t starting_tile(const PassView& view, int expert, std::int64_t count) {
  if (view.comes_in_waves()) return first_wave_begin(view, expert) % count;
  return first_tile_from(view, expert, starting_token(view));
}

/// The pulls of the rows that the pass dispatches, in canonical order.
std::vector<Pull> canonical_pulls(const PassView& view, const PlanData& plan) {
  const bool dedup = view.schedule.dispatch_wire == DispatchWire::kDedup;
  std::vector<Pull> pulls;
  pulls.reserve(plan.pulls.size());
  for (const Pull& pull : plan.pulls) {
    const std::int32_t rows = dispatched_rows(view, pull);
    if (dedup && rows > 0) pulls.push_back({pull.source, pull.token, pull.first_row, rows});
    for (std::int32_t c = 0; !dedup && c < rows; ++c) {
      pulls.push_back({pull.source, pull.token, pull.first_row + c, 1});
    }
  }
  return pulls;
}

}  // namespace

void PassOrder::count_dispatched() {
  for (int e = 0; e < view_.num_local_experts; ++e) {
    dispatched_per_expert_.push_back(is_dispatched(view_, e) ? view_.tokens_per_expert[e] : 0);
  }
  view_.dispatched_per_expert = dispatched_per_expert_.data();
}

void PassOrder::order_tiles() {
  const std::int64_t tile_m = view_.schedule.tile_m;
  // Segments are aligned to whole tiles, so a row's tile follows from its number alone.
  position_of_tile_.resize(static_cast<std::size_t>(plan_.segment_begin.back() / tile_m));
  tile_begin_.push_back(0);
  for (int wave = 0; wave < view_.schedule.waves; ++wave) {
    for (const std::int32_t e : expert_order_) {
      const std::int64_t rows = plan_.tokens_per_expert[static_cast<std::size_t>(e)];
      const std::int64_t count = ceil_div(rows, tile_m);
      const std::int64_t start = count == 0 ? 0 : starting_tile(view_, e, count);
      const std::int64_t end = wave_begin(view_, e, count, wave + 1);
      for (std::int64_t i = wave_begin(view_, e, count, wave); i < end; ++i) {
        const std::int64_t t = (start + i) % count;
        const std::int64_t first_row =
            plan_.segment_begin[static_cast<std::size_t>(e)] + t * tile_m;
        position_of_tile_[static_cast<std::size_t>(first_row / tile_m)] =
            static_cast<std::int32_t>(tiles_.size());
        tiles_.push_back(
            {first_row, static_cast<std::int32_t>(min_of(tile_m, rows - t * tile_m)), e});
      }
      tile_begin_.push_back(static_cast<std::int64_t>(tiles_.size()));
    }
  }
  view_.tiles = tiles_.data();
  view_.tile_begin = tile_begin_.data();
}

void PassOrder::order_pulls() {
  const std::vector<Pull> canonical = canonical_pulls(view_, plan_);
  // A pull is needed first by the earliest-taken tile that any of its rows lies in.
  const auto tile_m = static_cast<std::uint64_t>(view_.schedule.tile_m);
  std::vector<std::int32_t> needed_by(canonical.size());
  for (std::size_t i = 0; i < canonical.size(); ++i) {
    auto first = static_cast<std::int32_t>(tiles_.size());
    for (int c = 0; c < canonical[i].num_rows; ++c) {
      const auto row = static_cast<std::uint64_t>(
          plan_.pull_rows[static_cast<std::size_t>(canonical[i].first_row + c)]);
      first = min_of(first, position_of_tile_[row / tile_m]);
    }
    needed_by[i] = first;
  }
  // Stable counting sort by that tile.
  std::vector<std::int64_t> begin(tiles_.size() + 1);
  for (const std::int32_t tile : needed_by) ++begin[static_cast<std::size_t>(tile) + 1];
  std::partial_sum(begin.begin(), begin.end(), begin.begin());
  for (const std::int64_t tile : tile_begin_) {
    pull_begin_.push_back(begin[static_cast<std::size_t>(tile)]);
  }
  pulls_.resize(canonical.size());
  for (std::size_t i = 0; i < canonical.size(); ++i) {
    pulls_[static_cast<std::size_t>(begin[static_cast<std::size_t>(needed_by[i])]++)] =
        canonical[i];
  }
  view_.pulls = pulls_.data();
  view_.pull_begin = pull_begin_.data();
}

void PassOrder::count_slots() {
  slots_to_peer_.assign(static_cast<std::size_t>(view_.num_token_blocks() * view_.num_ranks), 0);
  const std::int32_t* id = plan_.topk_ids.data();
  for (std::int64_t token = 0; token < view_.tokens; ++token) {
    std::int64_t* slots =
        slots_to_peer_.data() + token / view_.schedule.token_block * view_.num_ranks;
    for (int k = 0; k < view_.topk; ++k, ++id) {
      if (*id >= 0 && view_.is_here(view_.rank_of_expert(*id))) {
        ++slots[view_.rank_of_expert(*id)];
      }
    }
    slots[view_.rank] += view_.shared_experts;
  }
  view_.slots_to_peer = slots_to_peer_.data();
}

}  // namespace uniep
