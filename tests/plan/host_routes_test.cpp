// Two levels of routing against what the plans of all ranks say.
#include "plan/host_routes.h"

#include <gtest/gtest.h>

#include <set>
#include <tuple>

#include "support/cases.h"
#include "support/expect_error.h"
#include "support/random_routing.h"

namespace uniep::testing {
namespace {

/// What plans say of a routing: of every row, whose it is and which expert's.
struct RoutedCopy {
  int rank, expert, source, token;
};

std::vector<RoutedCopy> copies_of(const Routing& r) {
  std::vector<RoutedCopy> copies;
  for (int rank = 0; rank < r.ranks(); ++rank) {
    const RoutingPlan plan = r.plan(rank);
    for (int e = 0; e < plan.num_local_experts(); ++e) {
      const auto expert = static_cast<std::size_t>(e);
      for (std::int64_t i = 0; i < plan.tokens_per_expert()[expert]; ++i) {
        const auto row = static_cast<std::size_t>(plan.segment_begin()[expert] + i);
        const RowOrigin origin = plan.row_origin()[row];
        copies.push_back({rank, plan.first_expert() + e, origin.source, origin.token});
      }
    }
  }
  return copies;
}

template <class Key>
std::int64_t distinct(const std::vector<RoutedCopy>& copies, Key&& key) {
  std::set<std::tuple<int, int, int>> keys;
  for (const RoutedCopy& c : copies) {
    if (const auto k = key(c)) keys.insert(*k);
  }
  return static_cast<std::int64_t>(keys.size());
}

using Third = std::optional<std::tuple<int, int, int>>;

HostTraffic traffic_of(const Routing& r, const RankLayout& layout, HostWire wire) {
  return host_traffic(r.problem, {r.tokens, r.ids}, layout, wire);
}

std::int64_t all(const LinkCounts& c) { return c.own + c.nvlink + c.network; }

TEST(RankLayout, RelaysAreOfTheRail) {
  for (const int hosts : {1, 2, 4}) {
    const RankLayout layout = layout_of_hosts(8, hosts);
    EXPECT_EQ(layout.ranks(), 8);
    for (int source = 0; source < 8; ++source) {
      for (int host = 0; host < hosts; ++host) {
        const int relay = layout.relay(source, host);
        EXPECT_EQ(layout.host_of(relay), host);
        EXPECT_EQ(layout.local_of(relay), layout.local_of(source));
      }
      EXPECT_EQ(layout.relay(source, layout.host_of(source)), source);
    }
  }
}

TEST(RankLayout, UnequalHostsAreRefused) {
  for (const int hosts : {3, 0, 16, -1}) {
    expect_invalid(cat("number of hosts is ", hosts,
                       " of 8 ranks; hosts are equal, so a divisor of the number of ranks from 1 "
                       "on is accepted"),
                   [&] { layout_of_hosts(8, hosts); });
  }
}

TEST(HostRoutes, WithinAHostAreThePlans) {
  for (int seed = 1; seed <= cases(60); ++seed) {
    Rng rng(static_cast<unsigned>(seed));
    const Routing r = random_routing(rng, 30);
    SCOPED_TRACE(cat("seed ", seed, ", ", describe(r)));
    Traffic sum;
    std::int64_t pulls = 0;
    for (int rank = 0; rank < r.ranks(); ++rank) {
      const RoutingPlan plan = r.plan(rank);
      sum.rows += plan.traffic().rows;
      sum.remote_rows += plan.traffic().remote_rows;
      sum.remote_pulls += plan.traffic().remote_pulls;
      pulls += plan.received_tokens();
    }
    const HostTraffic direct = traffic_of(r, layout_of_hosts(r.ranks(), 1), HostWire::kDirect);
    const LinkCounts tokens{pulls - sum.remote_pulls, sum.remote_pulls, 0};
    const LinkCounts rows{sum.rows - sum.remote_rows, sum.remote_rows, 0};
    EXPECT_EQ(direct.tokens, tokens);
    EXPECT_EQ(direct.rows, rows);
    const HostTraffic relayed = traffic_of(r, layout_of_hosts(r.ranks(), 1), HostWire::kRelayed);
    EXPECT_EQ(relayed.tokens, tokens);
    EXPECT_EQ(relayed.rows, rows);
    EXPECT_EQ(all(relayed.partials), 0);
  }
}

TEST(HostRoutes, ATokenCrossesToAHostOnce) {
  for (int seed = 1; seed <= cases(200); ++seed) {
    Rng rng(static_cast<unsigned>(seed));
    const int hosts = 1 << pick(rng, 1, 2);
    const RankLayout layout = layout_of_hosts(hosts * static_cast<int>(pick(rng, 1, 3)), hosts);
    Routing r = random_routing(rng, random_problem(rng, layout.ranks(), 20), layout.ranks());
    const bool summed = chance(rng, 50);
    if (summed) r.problem.combine_groups = chance(rng, 50) ? hosts : layout.ranks();
    SCOPED_TRACE(cat("seed ", seed, ", ", hosts, " hosts, ", describe(r)));
    const std::vector<RoutedCopy> copies = copies_of(r);
    const auto far = [&](const RoutedCopy& c) { return !layout.same_host(c.rank, c.source); };
    const std::int64_t far_rows = std::ranges::count_if(copies, far);
    const std::int64_t fetched = distinct(copies, [](const RoutedCopy& c) {
      return Third({c.source, c.token, c.rank});
    });
    const std::int64_t crossings = distinct(copies, [&](const RoutedCopy& c) {
      return far(c) ? Third({c.source, c.token, layout.host_of(c.rank)}) : std::nullopt;
    });
    const int group_experts = r.problem.num_experts / r.problem.combine_groups;
    const std::int64_t sums = distinct(copies, [&](const RoutedCopy& c) {
      return far(c) ? Third({c.source, c.token, c.expert / group_experts}) : std::nullopt;
    });

    const HostTraffic relayed = traffic_of(r, layout, HostWire::kRelayed);
    EXPECT_EQ(relayed.tokens.network, crossings);
    EXPECT_EQ(relayed.tokens.own + relayed.tokens.nvlink, fetched);
    const auto rows = static_cast<std::int64_t>(copies.size());
    EXPECT_EQ(relayed.rows.own + relayed.rows.nvlink, rows);
    EXPECT_EQ(relayed.rows.network, summed ? 0 : far_rows);
    EXPECT_EQ(relayed.partials.network, summed ? sums : 0);
    if (r.problem.combine_groups == hosts) {
      EXPECT_EQ(relayed.partials.network, crossings);
    }

    const HostTraffic direct = traffic_of(r, layout, HostWire::kDirect);
    EXPECT_EQ(all(direct.tokens), fetched);
    EXPECT_EQ(direct.rows.network, far_rows);
    EXPECT_EQ(all(direct.rows), rows);
    EXPECT_GE(direct.tokens.network, relayed.tokens.network);
  }
}

// A group that lies on two hosts has no sum on either of them.
TEST(HostRoutes, GroupsAcrossHostsReturnRows) {
  Rng rng(5);
  const RankLayout layout = layout_of_hosts(4, 4);
  Routing r = random_routing(rng, random_problem(rng, 4, 20), 4);
  r.problem.combine_groups = 2;
  EXPECT_FALSE(sums_cross(r.problem, layout.hosts));
  const HostTraffic two = traffic_of(r, layout, HostWire::kRelayed);
  r.problem.combine_groups = 1;
  EXPECT_EQ(two.rows, traffic_of(r, layout, HostWire::kRelayed).rows);
  EXPECT_EQ(all(two.partials), 0);
}

TEST(HostRoutes, CountsBytes) {
  Problem p{.hidden = 64};
  EXPECT_EQ(partial_bytes(p), 256);
  p.combine_partials = CombinePartials::kBf16;
  EXPECT_EQ(partial_bytes(p), 128);
  EXPECT_EQ(bytes_of({1, 2, 3}, 10), (LinkBytes{10, 20, 30}));
}

}  // namespace
}  // namespace uniep::testing
