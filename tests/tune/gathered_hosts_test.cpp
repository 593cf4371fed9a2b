// Passes of GPUs over several hosts in simulated time: what crosses shows where nothing hides it.
#include "tune/model/gathered_hosts.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "support/expect_error.h"
#include "tune/made_up_profile.h"
#include "tune/model/cost_model.h"
#include "workload/synthetic.h"

namespace uniep::testing {
namespace {

using tune::CrossesUnder;

constexpr int kHosts = 2;
constexpr int kRanks = 4;
constexpr CrossesUnder kAllWays[] = {CrossesUnder::kNothing, CrossesUnder::kWeights,
                                     CrossesUnder::kPasses};

struct Layer {
  Problem problem;
  std::vector<std::int32_t> ids;

  tune::GatheredHost host(CrossesUnder under, int hosts = kHosts) const {
    return tune::gathered_host(problem, kRanks, hosts, ids, under);
  }
};

Layer layer() {
  const workload::ShapeSpec spec =
      workload::parse_shape("tiny,tokens=512,hidden=256,intermediate=256,experts=8,topk=2");
  Layer made{workload::problem_of(spec), workload::make_routing(spec, kRanks, 0, 0).topk_ids};
  made.problem.capacity_rows = rows_of_any_routing(made.problem, kRanks);
  return made;
}

/// A GPU of 16 SMs whose memory takes no time.
tune::MachineProfile gpu() {
  tune::MachineProfile profile = made_up_profile();
  profile.cores = 0;
  profile.workers = 16;
  profile.reduce.per_byte = 0;
  return profile;
}

double seconds(const Layer& l, CrossesUnder under, Pass pass, double nic, int hosts = kHosts) {
  const tune::Topology topology{
      .ranks_per_node = kRanks / hosts, .nic_bytes_per_s = nic, .nic_latency_s = 0};
  return tune::simulate_gathered(l.host(under, hosts), false, pass,
                                 parse_schedule("single,tile_m=64"), gpu(), topology)
      .seconds;
}

/// What a rank's rows take to another host.
double crossing(const Layer& l, double nic) {
  return static_cast<double>(l.problem.max_tokens * l.problem.hidden * 2) / nic;
}

TEST(GatheredHosts, RanksSeeTheTokensOfTheirRail) {
  const Layer l = layer();
  std::int64_t rows = 0;
  for (const CrossesUnder under : kAllWays) {
    const std::vector<RoutingPlan> plans = l.host(under).plans;
    ASSERT_EQ(std::ssize(plans), kRanks / kHosts);
    for (const RoutingPlan& plan : plans) {
      EXPECT_EQ(plan.tokens(), kHosts * l.problem.max_tokens);
      EXPECT_EQ(plan.problem().first_host >= 0, under == CrossesUnder::kPasses);
      for (const std::int64_t n : plan.tokens_per_expert()) rows += n;
    }
  }
  // Of two hosts that with more rows.
  EXPECT_GE(rows / 3, std::ssize(l.ids) / 2);
  EXPECT_LE(rows / 3, std::ssize(l.ids));
}

TEST(GatheredHosts, InTurnAllThatCrossesShows) {
  const Layer l = layer();
  for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
    const double alone = seconds(l, CrossesUnder::kNothing, pass, 1e30);
    const double crosses = 2 * crossing(l, 1e6);
    const double found = seconds(l, CrossesUnder::kNothing, pass, 1e6) - alone;
    EXPECT_GE(found, crosses);
    EXPECT_LE(found, 1.05 * crosses);  // numbers and probabilities of 2 slots
  }
}

TEST(GatheredHosts, BehindSlowLinksNothingHidesAndNothingIsLost) {
  const Layer l = layer();
  for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
    for (const CrossesUnder under : kAllWays) {
      const double crosses = 2 * crossing(l, 1);
      const double found = seconds(l, under, pass, 1);
      EXPECT_GE(found, crosses);
      EXPECT_LE(found, 1.05 * crosses);
    }
  }
}

TEST(GatheredHosts, WhatCrossesUnderPassesHides) {
  const Layer l = layer();
  const double forward = seconds(l, CrossesUnder::kNothing, Pass::kForward, 1e30);
  const double nic = crossing(l, 1) / (forward / 5);
  const auto shows = [&](CrossesUnder under, Pass pass) {
    return seconds(l, under, pass, nic) - seconds(l, under, pass, 1e30);
  };
  const double each = crossing(l, nic);
  EXPECT_GT(shows(CrossesUnder::kNothing, Pass::kForward), 1.9 * each);
  EXPECT_GT(shows(CrossesUnder::kWeights, Pass::kForward), 1.9 * each);
  EXPECT_LT(shows(CrossesUnder::kPasses, Pass::kForward), 0.2 * each);
  EXPECT_GT(shows(CrossesUnder::kNothing, Pass::kBackward), 1.9 * each);
  EXPECT_LT(shows(CrossesUnder::kWeights, Pass::kBackward), 1.1 * each);
  EXPECT_LT(shows(CrossesUnder::kPasses, Pass::kBackward), 0.2 * each);
}

TEST(GatheredHosts, OneHostCrossesNothing) {
  const Layer l = layer();
  const auto plans = l.host(CrossesUnder::kNothing, 1).plans;
  for (const CrossesUnder under : kAllWays) {
    EXPECT_EQ(
        seconds(l, under, Pass::kForward, 1, 1),
        tune::simulate(plans, Pass::kForward, parse_schedule("single,tile_m=64"), gpu()).seconds);
  }
}

TEST(GatheredHosts, BytesAreThoseOfTokensAndSums) {
  const Layer l = layer();
  const tune::Topology topology{.ranks_per_node = kRanks / kHosts, .nic_bytes_per_s = 1e9};
  for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
    // Of a slot 4 bytes of a number and 4 of a probability; or of its gradient.
    const std::int64_t slot = pass == Pass::kForward ? 8 : 4;
    const std::int64_t token = 2 * 2 * l.problem.hidden + slot * l.problem.topk;
    for (const CrossesUnder under : kAllWays) {
      const auto found = tune::simulate_gathered(l.host(under), false, pass,
                                                 parse_schedule("single"), gpu(), topology);
      EXPECT_EQ(found.bytes.network, kRanks / kHosts * l.problem.max_tokens * token);
    }
  }
}

/// On four hosts of one rank each: how many tokens of other hosts have experts of the fullest.
std::int64_t needed_elsewhere(const Layer& l, int host) {
  const std::int64_t tokens = l.problem.max_tokens, experts = l.problem.num_experts / kRanks;
  std::int64_t count = 0;
  for (std::int64_t token = 0; token < kRanks * tokens; ++token) {
    if (token / tokens == host) continue;
    const std::int32_t* slots = &l.ids[static_cast<std::size_t>(token * l.problem.topk)];
    const auto here = [&](std::int32_t id) { return id / experts == host; };
    count += std::any_of(slots, slots + l.problem.topk, here) ? 1 : 0;
  }
  return count;
}

TEST(GatheredHosts, ExactHostsHaveWhatTheirExpertsNeed) {
  const Layer l = layer();
  const double nic = 1;
  const tune::Topology topology{.ranks_per_node = 1, .nic_bytes_per_s = nic, .nic_latency_s = 0};
  for (const CrossesUnder under : kAllWays) {
    const tune::GatheredHost host = l.host(under, kRanks);
    const std::int64_t all = (kRanks - 1) * l.problem.max_tokens;
    const std::int64_t needed = needed_elsewhere(l, host.host);
    ASSERT_LT(needed, all * 2 / 3);
    for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
      const auto found = [&](bool exact) {
        return tune::simulate_gathered(host, exact, pass, parse_schedule("single,tile_m=64"), gpu(),
                                       topology);
      };
      const double fewer = static_cast<double>((all - needed) * 2 * 2 * l.problem.hidden);
      EXPECT_EQ(found(false).bytes.network - found(true).bytes.network, fewer);
      // The network decides here, so that all of it shows; that the host waits does not.
      EXPECT_NEAR(found(false).seconds - found(true).seconds, fewer / nic, 0.01 * fewer / nic);
    }
  }
}

TEST(GatheredHosts, AllRowsAreOneForEachSlot) {
  const Layer l = layer();
  const tune::Topology topology{.ranks_per_node = 1, .nic_bytes_per_s = 1, .nic_latency_s = 0};
  for (const CrossesUnder under : kAllWays) {
    const auto host = tune::gathered_host(l.problem, kRanks, kRanks, l.ids, under, true);
    EXPECT_TRUE(host.plans[0].problem().slot_rows);
    const std::int64_t others = (kRanks - 1) * l.problem.max_tokens;
    const std::span<const std::int32_t> ids = host.plans[0].topk_ids();
    const std::int64_t first = host.host * l.problem.max_tokens * l.problem.topk;
    std::int64_t rows = 0;
    for (std::int64_t i = 0; i < std::ssize(ids); ++i) {
      const bool is_own = i >= first && i < first + l.problem.max_tokens * l.problem.topk;
      if (!is_own && ids[static_cast<std::size_t>(i)] >= 0) ++rows;
    }
    ASSERT_GT(rows, 0);
    for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
      const auto found = [&](bool exact) {
        return tune::simulate_gathered(host, exact, pass, parse_schedule("single,tile_m=64"), gpu(),
                                       topology);
      };
      const std::int64_t slots = others * l.problem.topk * (pass == Pass::kForward ? 8 : 4);
      const std::int64_t row = 2 * l.problem.hidden;
      const std::int64_t all = (others + others * l.problem.topk) * row + slots;
      EXPECT_EQ(found(false).bytes.network, all);
      const std::int64_t exact = (needed_elsewhere(l, host.host) + rows) * row + slots;
      EXPECT_EQ(found(true).bytes.network, exact);
      EXPECT_GE(found(false).seconds, static_cast<double>(all));
      EXPECT_LE(found(false).seconds, 1.01 * static_cast<double>(all));
    }
  }
}

TEST(SpareWorkers, AreFewerAndTheOthersFaster) {
  const tune::MachineProfile profile = gpu();
  const tune::MachineProfile fewer = tune::with_spare_workers(profile, 4);
  EXPECT_EQ(fewer.workers, 12);
  EXPECT_LT(fewer.gemms[0].fixed, profile.gemms[0].fixed);
  EXPECT_GT(fewer.gemms[0].fixed / 12, profile.gemms[0].fixed / 16);
  EXPECT_EQ(tune::with_spare_workers(profile, 0), profile);
  expect_invalid("workers that are spared are 16 of 16; 0 to all but one are accepted",
                 [&] { (void)tune::with_spare_workers(profile, 16); });
}

}  // namespace
}  // namespace uniep::testing
