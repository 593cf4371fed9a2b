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

double Relays::fetch(Network& network, const PassView& v, Stage stage, std::span<const Pull> pulls,
                     double asked, double rate) {
  const int source = pulls.front().source;
  const std::int64_t each = token_bytes(v, stage);
  const auto bytes = static_cast<double>(each * static_cast<std::int64_t>(pulls.size()));
  const int from = relayed_ ? layout_.relay(source, layout_.host_of(v.rank)) : source;
  // The link is asked for at once, lest a token that is still to come hold up those behind it.
  const auto hop = network.transfer(v.rank, from, v.rank, bytes, asked, rate);
  if (from == source) return hop.done;
  const double there = crossed(network, stage, pulls, from, each, asked);
  return std::max(hop.done, there + (hop.done - hop.begun));
}

double Relays::crossed(Network& network, Stage stage, std::span<const Pull> pulls, int relay,
                       std::int64_t token_bytes, double asked) {
  const int source = pulls.front().source;
  std::vector<double>& there = there_[{stage, layout_.host_of(relay), source}];
  const auto at = [&](const Pull& pull) -> double& {
    const auto token = static_cast<std::size_t>(pull.token);
    if (there.size() <= token) there.resize(token + 1, -1);
    return there[token];
  };
  std::int64_t fresh = 0;
  for (const Pull& pull : pulls) fresh += at(pull) < 0 ? 1 : 0;
  double done = asked;
  if (fresh > 0) {
    const auto bytes = static_cast<double>(fresh * token_bytes);
    done = network.transfer(relay, source, relay, bytes, asked).done;
  }
  double last = asked;
  for (const Pull& pull : pulls) {
    double& when = at(pull);
    if (when < 0) when = done;
    last = std::max(last, when);
  }
  return last;
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
