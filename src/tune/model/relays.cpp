#include "tune/model/relays.h"

#include <algorithm>

#include "base/check.h"
#include "tune/model/task_cost.h"

namespace uniep::tune {

Relays::Relays(std::span<const RoutingPlan> plans, const Topology& topology) {
  const Problem& p = plans[0].problem();
  const int ranks = plans[0].num_ranks();
  layout_ = {.hosts = 1, .local_ranks = ranks};
  relayed_ = topology.wire == HostWire::kRelayed && topology.ranks_per_node > 0;
  if (!relayed_) return;
  require(static_cast<int>(plans.size()) == ranks, ErrorCode::kInvalidArgument, plans.size(),
          " ranks of ", ranks, " are simulated; relays between hosts take all of them");
  require(ranks % topology.ranks_per_node == 0, ErrorCode::kInvalidArgument, "ranks of a host are ",
          topology.ranks_per_node, "; a divisor of the number of ranks, ", ranks, ", is accepted");
  layout_ = layout_of_hosts(ranks, ranks / topology.ranks_per_node);
  groups_ = p.combine_groups;
  group_experts_ = p.num_experts / groups_;
  sums_ = groups_ > 1 && groups_keep_to_hosts(p, layout_);
  if (!sums_) return;
  sum_element_ = partial_bytes(p) / p.hidden;
  first_token_.push_back(0);
  for (const std::int64_t tokens : plans[0].tokens_per_rank()) {
    first_token_.push_back(first_token_.back() + tokens);
  }
  rows_.assign(static_cast<std::size_t>(first_token_.back() * groups_), 0);
  came_.assign(rows_.size(), 0);
  for (const RoutingPlan& plan : plans) {
    for (int e = 0; e < plan.num_local_experts(); ++e) {
      const auto expert = static_cast<std::size_t>(e);
      const auto rows =
          plan.row_origin().subspan(static_cast<std::size_t>(plan.segment_begin()[expert]),
                                    static_cast<std::size_t>(plan.tokens_per_expert()[expert]));
      for (const RowOrigin& row : rows) {
        ++rows_[sum_index(row.source, row.token, plan.first_expert() + e)];
      }
    }
  }
}

std::size_t Relays::sum_index(int source, std::int64_t token, int expert) const {
  const std::int64_t t = first_token_[static_cast<std::size_t>(source)] + token;
  return static_cast<std::size_t>(t * groups_ + expert / group_experts_);
}

std::vector<std::int32_t> Relays::needed(std::span<const PassView> views, int source,
                                         int host) const {
  std::map<std::int32_t, std::int64_t> first;  // by token
  for (int local = 0; local < layout_.local_ranks; ++local) {
    const PassView& v = views[static_cast<std::size_t>(layout_.rank_at(host, local))];
    for (std::int64_t i = 0; i < v.pull_begin[v.num_blocks()]; ++i) {
      if (v.pulls[i].source != source) continue;
      const auto [entry, is_new] = first.emplace(v.pulls[i].token, i);
      if (!is_new) entry->second = std::min(entry->second, i);
    }
  }
  std::vector<std::int32_t> tokens;
  for (const auto& [token, position] : first) tokens.push_back(token);
  std::ranges::stable_sort(tokens, {}, [&](std::int32_t token) { return first.at(token); });
  return tokens;
}

void Relays::cross(Network& network, std::span<const PassView> views,
                   std::span<const double> entered) {
  if (!relayed_) return;
  struct Rail {
    int source, host;
    std::vector<std::int32_t> tokens;
  };
  std::vector<Rail> rails;
  std::size_t longest = 0;
  for (int source = 0; source < layout_.ranks(); ++source) {
    for (int host = 0; host < layout_.hosts; ++host) {
      if (host == layout_.host_of(source)) continue;
      rails.push_back({source, host, needed(views, source, host)});
      longest = std::max(longest, rails.back().tokens.size());
    }
  }
  const PassView& any = views[0];
  for (int row = 0; row < any.num_stages; ++row) {
    const Stage stage = any.stage_at(row);
    if (any.stage(stage).side != StageSide::kPull) continue;
    const auto bytes = static_cast<double>(token_bytes(any, stage));
    for (std::size_t i = 0; i < longest; ++i) {  // all rails go on at the same pace
      for (const Rail& rail : rails) {
        if (i >= rail.tokens.size()) continue;
        const auto source = static_cast<std::size_t>(rail.source);
        const auto token = static_cast<std::size_t>(rail.tokens[i]);
        std::vector<double>& there = there_[{stage, rail.host, rail.source}];
        there.resize(static_cast<std::size_t>(views[source].tokens));
        const int relay = layout_.relay(rail.source, rail.host);
        there[token] = network.transfer(relay, rail.source, relay, bytes, entered[source]).done;
      }
    }
  }
}

double Relays::fetch(Network& network, const PassView& v, Stage stage, std::span<const Pull> pulls,
                     double asked, double rate) {
  const int source = pulls.front().source;
  const std::int64_t each = token_bytes(v, stage);
  const auto bytes = static_cast<double>(each * static_cast<std::int64_t>(pulls.size()));
  const int from = relayed_ ? layout_.relay(source, layout_.host_of(v.rank)) : source;
  // The link is asked for at once: a token that is still to come would hold up those behind it.
  const auto hop = network.transfer(v.rank, from, v.rank, bytes, asked, rate);
  if (from == source) return hop.done;
  const std::vector<double>& there = there_.at({stage, layout_.host_of(v.rank), source});
  double last = 0;
  for (const Pull& pull : pulls) last = std::max(last, there[static_cast<std::size_t>(pull.token)]);
  return std::max(hop.done, last + (hop.done - hop.begun));
}

Relays::Sent Relays::send(Network& network, const PassView& v, const Task& task,
                          const PushedTiles::Run& run, std::int64_t columns, std::int64_t element,
                          double asked, double rate) {
  const int relay = relayed_ ? layout_.relay(run.rank, layout_.host_of(v.rank)) : run.rank;
  auto bytes = static_cast<double>(element * run.rows * columns);
  const auto hop = network.transfer(v.rank, v.rank, relay, bytes, asked, rate);
  if (relay == run.rank) return {hop.begun, hop.done, hop.done};
  double from = hop.done;
  if (sums_) {
    const Complete sums = complete(v, task, run.rank, hop.done);
    if (sums.sums == 0) return {hop.begun, hop.done, hop.done};
    bytes = static_cast<double>(sums.sums * sum_element_ * columns);
    from = sums.from;
  }
  return {hop.begun, hop.done, network.transfer(relay, relay, run.rank, bytes, from).done};
}

Relays::Complete Relays::complete(const PassView& v, const Task& task, int source, double came) {
  const auto n = static_cast<std::size_t>(task.n);
  if (left_.size() <= n) left_.resize(n + 1, rows_);
  const Tile& tile = v.tiles[task.m];
  const int expert = v.rank * v.num_local_experts + tile.expert;
  Complete complete;
  for (std::int64_t row = tile.first_row; row < tile.first_row + tile.rows; ++row) {
    const RowOrigin& origin = v.row_origin[row];
    if (origin.source != source) continue;
    const std::size_t sum = sum_index(source, origin.token, expert);
    came_[sum] = std::max(came_[sum], came);
    if (--left_[n][sum] > 0) continue;
    ++complete.sums;
    complete.from = std::max(complete.from, came_[sum]);
  }
  return complete;
}

}  // namespace uniep::tune
