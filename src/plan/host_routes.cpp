#include "plan/host_routes.h"

#include <set>
#include <utility>

#include "base/check.h"
#include "graph/graph.h"

namespace uniep {
namespace {

/// The routes of one token: who gets it from whom, and what returns to its source.
class TokenRoutes {
 public:
  TokenRoutes(const Problem& problem, const RankLayout& layout, HostWire wire)
      : layout_(layout),
        local_experts_(problem.num_experts / layout.ranks()),
        group_experts_(problem.num_experts / problem.combine_groups),
        relayed_(wire == HostWire::kRelayed),
        sums_(relayed_ && sums_cross(problem, layout.hosts)) {}

  void count(int source, std::span<const std::int32_t> experts, HostTraffic& traffic) const {
    std::set<int> ranks;                     // with a slot of the token
    std::set<int> hosts;                     // others than the source's, likewise
    std::set<std::pair<int, int>> partials;  // of these hosts: host, group
    for (const std::int32_t expert : experts) {
      if (expert < 0) continue;
      const int rank = expert / local_experts_;
      const int host = layout_.host_of(rank);
      const bool far = host != layout_.host_of(source);
      ranks.insert(rank);
      if (far) hosts.insert(host);
      if (far && sums_) partials.emplace(host, expert / group_experts_);
      const int relay = relayed_ ? layout_.relay(source, host) : source;
      traffic.rows.count(layout_, rank, relay);
      if (far && relayed_ && !sums_) traffic.rows.count(layout_, relay, source);
    }
    for (const int rank : ranks) {
      const int from = relayed_ ? layout_.relay(source, layout_.host_of(rank)) : source;
      traffic.tokens.count(layout_, from, rank);
    }
    if (!relayed_) return;
    traffic.tokens.network += static_cast<std::int64_t>(hosts.size());
    traffic.partials.network += static_cast<std::int64_t>(partials.size());
  }

 private:
  const RankLayout& layout_;
  int local_experts_, group_experts_;
  bool relayed_, sums_;
};

}  // namespace

HostTraffic host_traffic(const Problem& problem, const Routing& routing, const RankLayout& layout,
                         HostWire wire) {
  require(layout.ranks() == routing.num_ranks(), ErrorCode::kInvalidArgument, "the layout has ",
          layout.ranks(), " ranks; the routing's ", routing.num_ranks(), " are accepted");
  const TokenRoutes routes(problem, layout, wire);
  const auto topk = static_cast<std::size_t>(problem.topk);
  HostTraffic traffic;
  std::size_t slot = 0;
  for (int source = 0; source < routing.num_ranks(); ++source) {
    const std::int64_t tokens = routing.tokens_per_rank[static_cast<std::size_t>(source)];
    for (std::int64_t t = 0; t < tokens; ++t, slot += topk) {
      routes.count(source, routing.topk_ids.subspan(slot, topk), traffic);
    }
  }
  return traffic;
}

LinkBytes bytes_of(const LinkCounts& counts, std::int64_t each) {
  return {counts.own * each, counts.nvlink * each, counts.network * each};
}

std::int64_t partial_bytes(const Problem& problem) {
  const std::int64_t element = problem.combine_partials == CombinePartials::kFp32 ? 4 : 2;
  return problem.hidden * element;
}

}  // namespace uniep
