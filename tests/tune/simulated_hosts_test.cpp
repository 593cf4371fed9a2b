// Passes over several hosts in simulated time: their bytes are those that the plan counts, and what
// crosses the network less is gained.
#include <gtest/gtest.h>

#include "plan/host_routes.h"
#include "support/cases.h"
#include "support/expect_error.h"
#include "support/random_routing.h"
#include "tune/made_up_profile.h"
#include "tune/model/cost_model.h"

namespace uniep::testing {
namespace {

std::vector<RoutingPlan> plans_of(const Routing& r) {
  std::vector<RoutingPlan> plans;
  for (int rank = 0; rank < r.ranks(); ++rank) plans.push_back(r.plan(rank));
  return plans;
}

tune::MachineProfile with_link(double bytes_per_s) {
  tune::MachineProfile profile = made_up_profile();
  profile.link.bytes_per_s = bytes_per_s;
  return profile;
}

LinkBytes sum(const LinkBytes& a, const LinkBytes& b) {
  return {a.own + b.own, a.nvlink + b.nvlink, a.network + b.network};
}

/// What the plan says that a pass moves.
LinkBytes counted(const Routing& r, const RankLayout& layout, HostWire wire, Pass pass) {
  const HostTraffic traffic = host_traffic(r.problem, {r.tokens, r.ids}, layout, wire);
  const WireBytes each = wire_bytes(r.problem, pass);
  return sum(sum(bytes_of(traffic.tokens, each.pulled_token),
                 bytes_of(traffic.rows, each.pushed_element * r.problem.hidden)),
             bytes_of(traffic.partials, partial_bytes(r.problem)));
}

TEST(SimulatedHosts, SimulatedBytesAreThoseOfThePlan) {
  int relayed_sums = 0;
  for (int seed = 1; seed <= cases(150); ++seed) {
    Rng rng(static_cast<unsigned>(seed));
    const int hosts = static_cast<int>(pick(rng, 1, 4));
    const RankLayout layout = layout_of_hosts(hosts * static_cast<int>(pick(rng, 1, 3)), hosts);
    Routing r = random_routing(rng, random_problem(rng, layout.ranks(), 40), layout.ranks());
    if (chance(rng, 60)) r.problem.combine_groups = chance(rng, 50) ? hosts : layout.ranks();
    if (chance(rng, 50)) r.problem.combine_partials = CombinePartials::kBf16;
    Schedule schedule = random_schedule(rng, r.problem, 3);
    schedule.dispatch_wire = DispatchWire::kDedup;
    const Pass pass = chance(rng, 50) ? Pass::kForward : Pass::kBackward;
    for (const HostWire wire : {HostWire::kDirect, HostWire::kRelayed}) {
      const tune::Topology topology{.ranks_per_node = layout.local_ranks, .nic_bytes_per_s = 1e3};
      r.hosts = wire == HostWire::kRelayed ? hosts : 1;
      const tune::SimulatedPass simulated =
          tune::simulate(plans_of(r), pass, schedule, with_link(1e4), {.topology = topology});
      EXPECT_EQ(simulated.bytes, counted(r, layout, wire, pass))
          << "seed " << seed << ", " << hosts << " hosts of " << layout.local_ranks << ", "
          << (wire == HostWire::kRelayed ? "relayed" : "direct") << ", " << name(pass) << ", "
          << describe(r) << "\n  " << to_string(schedule);
      if (::testing::Test::HasFailure()) return;
      const HostTraffic traffic = host_traffic(r.problem, {r.tokens, r.ids}, layout, wire);
      relayed_sums += traffic.partials.network > 0 ? 1 : 0;
    }
  }
  EXPECT_GT(relayed_sums, 0);
}

/// Every token of 8 ranks goes to all of them.
Routing everywhere(int groups, int hosts = 1) {
  Routing r;
  r.hosts = hosts;
  r.problem = {.hidden = 256,
               .intermediate = 128,
               .num_experts = 8,
               .topk = 8,
               .max_tokens = 64,
               .combine_groups = groups};
  r.tokens.assign(8, 64);
  for (int i = 0; i < 8 * 64 * 8; ++i) r.ids.push_back(i % 8);
  return r;
}

double seconds_of(const Routing& r, const tune::Topology& topology, const char* more) {
  return tune::simulate(plans_of(r), Pass::kForward,
                        parse_schedule(cat("single,tile_m=64,tile_n=128,", more)), with_link(1e9),
                        {.topology = topology})
      .seconds;
}
double seconds(const Routing& r, const tune::Topology& topology) {
  return seconds_of(r, topology, "waves=1");
}

TEST(SimulatedHosts, WhatCrossesTheNetworkDecidesWhereItIsSlow) {
  // So slow that nothing else counts. Of each token 4 copies cross, and 4 rows; or one of each.
  tune::Topology topology{.ranks_per_node = 4, .nic_bytes_per_s = 1, .nic_latency_s = 0};
  const double row = 64 * 256 * 2;  // seconds; of a rank's tokens one copy each
  const double direct = seconds(everywhere(1), topology);
  const double rows = seconds(everywhere(1, 2), topology);
  const double fp32 = seconds(everywhere(2, 2), topology);
  Routing rounded = everywhere(2, 2);
  rounded.problem.combine_partials = CombinePartials::kBf16;
  const double bf16 = seconds(rounded, topology);
  const auto near = [&](double found, double copies) {
    EXPECT_GE(found, copies * row);
    EXPECT_LE(found, copies * row + 0.5 * row) << copies;
  };
  EXPECT_GE(direct, 8 * row);  // and more: all ranks of a host begin with the same source
  near(rows, 5);
  near(fp32, 3);
  near(bf16, 2);
}

std::vector<RoutingPlan> plans_of_host(const Routing& r, int host) {
  const RankLayout layout = layout_of_hosts(r.ranks(), r.hosts);
  std::vector<RoutingPlan> plans;
  for (int l = 0; l < layout.local_ranks; ++l) plans.push_back(r.plan(layout.rank_at(host, l)));
  return plans;
}

TEST(SimulatedHosts, OneMayStandForAll) {
  const tune::Topology topology{.ranks_per_node = 2, .nic_bytes_per_s = 3e8};
  for (const int groups : {1, 4}) {
    Routing r = everywhere(groups, 4);
    Rng rng(7);
    // Three experts of eight, evenly: hosts differ a little.
    r.problem.topk = 3;
    r.ids.clear();
    for (int t = 0; t < 8 * 64; ++t) {
      const auto first = static_cast<std::int32_t>(pick(rng, 0, 7));
      for (int k = 0; k < 3; ++k) r.ids.push_back((first + 3 * k) % 8);
    }
    for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
      for (const char* text : {"sequential", "pipelined:2", "single,token_block=8"}) {
        const Schedule schedule = parse_schedule(cat(text, ",tile_m=64,tile_n=128"));
        const auto simulate = [&](const std::vector<RoutingPlan>& plans) {
          return tune::simulate(plans, pass, schedule, with_link(1e9), {.topology = topology});
        };
        const tune::SimulatedPass all = simulate(plans_of(r));
        const tune::SimulatedPass one = simulate(plans_of_host(r, 1));
        EXPECT_NEAR(one.seconds / all.seconds, 1, 0.05) << text << ", " << name(pass);
        EXPECT_NEAR(
            4.0 * static_cast<double>(one.bytes.network) / static_cast<double>(all.bytes.network),
            1, 0.1);
      }
    }
  }
}

TEST(SimulatedHosts, OneThatStandsForAllHearsAllThatItWaitsFor) {
  int taking_time = 0;
  for (int seed = 1; seed <= cases(100); ++seed) {
    Rng rng(static_cast<unsigned>(seed));
    const int hosts = static_cast<int>(pick(rng, 2, 5));
    const int ranks = hosts * static_cast<int>(pick(rng, 1, 3));
    Routing r = random_routing(rng, random_problem(rng, ranks, 40), ranks);
    r.hosts = hosts;
    if (chance(rng, 50)) r.problem.combine_groups = hosts;
    const Schedule schedule = random_schedule(rng, r.problem, 3);
    const Pass pass = chance(rng, 50) ? Pass::kForward : Pass::kBackward;
    const tune::Topology topology{.ranks_per_node = ranks / hosts, .nic_bytes_per_s = 1e3};
    const auto host = static_cast<int>(pick(rng, 0, hosts - 1));
    // Throws where a rank stands still.
    const double seconds = tune::simulate(plans_of_host(r, host), pass, schedule, with_link(1e4),
                                          {.topology = topology})
                               .seconds;
    taking_time += seconds > 0 ? 1 : 0;
  }
  EXPECT_GT(taking_time, cases(100) / 2);
}

TEST(SimulatedHosts, MessagesTakeTheTimeOfARailsThread) {
  const Routing r = everywhere(1, 2);
  tune::Topology topology{.ranks_per_node = 4, .nic_bytes_per_s = 1e12, .nic_latency_s = 0};
  const auto stage = [&](Stage s) {
    const PassStats stats =
        tune::simulate(plans_of(r), Pass::kForward,
                       parse_schedule("single,tile_m=64,tile_n=128,token_block=16"),
                       with_link(1e12), {.topology = topology})
            .stats[0];
    return stats[s].tasks;
  };
  const auto sent = static_cast<double>(stage(Stage::kSend) + stage(Stage::kRelay));
  ASSERT_GE(sent, 8);
  const double free = seconds(r, topology);
  topology.message_s = 100;                             // so long that nothing else counts
  const double thread = 2 * sent * topology.message_s;  // as many come as go
  EXPECT_GE(seconds_of(r, topology, "token_block=16"), 0.5 * thread);
  EXPECT_LE(seconds_of(r, topology, "token_block=16"), 1.5 * thread + free);
  EXPECT_LT(seconds_of(r, topology, "token_block=64"),
            0.5 * seconds_of(r, topology, "token_block=16"));
  topology.message_s = 0;
  topology.message_byte_s = 1;
  const double row = 64 * 256 * 2;
  EXPECT_GE(seconds(r, topology), 5 * row);  // a copy of each token goes out, and 4 rows
}

TEST(SimulatedHosts, TakeAllRanksOrThoseOfAHost) {
  const Routing r = everywhere(1, 2);
  const std::vector<RoutingPlan> one{r.plan(0)};
  expect_invalid("1 ranks of 8 on 2 hosts are simulated; all are accepted, and the 4 of a host",
                 [&] { tune::simulate(one, Pass::kForward, {}, with_link(1)); });
  expect_invalid("ranks of a host are 2; as the plans have it, 4 are accepted",
                 [&] { seconds(r, {.ranks_per_node = 2, .nic_bytes_per_s = 1}); });
}

}  // namespace
}  // namespace uniep::testing
