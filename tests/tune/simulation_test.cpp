// The simulator runs the queues of the backends, so what is checked here is time: sums that can be
// done by hand, and orders that must hold.
#include "tune/model/simulation.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <utility>

#include "schedule/queue_table.h"
#include "schedule/random_pass.h"
#include "support/cases.h"
#include "support/expect_error.h"
#include "support/ring_rows.h"
#include "tune/lab/timeline_samples.h"
#include "tune/made_up_profile.h"
#include "tune/model/cost_model.h"
#include "workload/synthetic.h"

namespace uniep::testing {
namespace {

using tune::MachineProfile;
using tune::simulate;
using tune::SimulatedPass;

/// A balanced layer: every rank has `tokens` tokens, token t goes to expert t and those behind it.
std::vector<RoutingPlan> even_plans(const Problem& p, int ranks, std::int64_t tokens) {
  std::vector<std::int32_t> ids;
  for (std::int64_t t = 0; t < tokens * ranks; ++t) {
    for (int k = 0; k < p.topk; ++k) {
      ids.push_back(static_cast<std::int32_t>((t + k) % p.num_experts));
    }
  }
  const std::vector<std::int64_t> per_rank(static_cast<std::size_t>(ranks), tokens);
  std::vector<RoutingPlan> plans;
  for (int r = 0; r < ranks; ++r) plans.push_back(RoutingPlan::build(p, r, per_rank, ids));
  return plans;
}

const Problem kProblem{
    .hidden = 256, .intermediate = 128, .num_experts = 4, .topk = 2, .max_tokens = 128};

std::int64_t tasks_of_stage(const SimulatedPass& pass, Stage stage) {
  std::int64_t count = 0;
  for (const PassStats& stats : pass.stats) count += stats[stage].tasks;
  return count;
}

TEST(Simulate, OneWorkerTakesTheSumOfItsTasks) {
  const auto plans = even_plans(kProblem, 1, 128);  // 64 rows an expert
  const Schedule s = parse_schedule("tile_m=64,tile_n=128");
  const SimulatedPass forward = simulate(plans, Pass::kForward, s, made_up_profile());
  EXPECT_EQ(tasks_of_stage(forward, Stage::kFc1), 4 * 2);
  EXPECT_EQ(tasks_of_stage(forward, Stage::kFc2), 4 * 2);
  EXPECT_DOUBLE_EQ(forward.seconds, 16);
  const SimulatedPass backward = simulate(plans, Pass::kBackward, s, made_up_profile());
  // dfc2 4, dfc1 8, wgrad2 4 x 4, wgrad1 4 x 4 x 2.
  EXPECT_DOUBLE_EQ(backward.seconds, 4 + 8 + 16 + 32);
}

TEST(Simulate, ProductsOfOtherExpertsThanSwigluTakeLongerOnGpus) {
  const Schedule s = parse_schedule("tile_m=64,tile_n=128");
  const auto seconds = [&](const Problem& p, Pass pass, Backend backend) {
    MachineProfile machine = made_up_profile();
    machine.backend = backend;
    return simulate(even_plans(p, 1, 128), pass, s, machine).seconds;
  };
  Problem biased = kProblem, after = kProblem;
  biased.bias = true;
  after.probs = Probs::kAfter;
  for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
    const double plain = seconds(kProblem, pass, Backend::kCuda);
    EXPECT_GT(seconds(after, pass, Backend::kCuda), plain);
    EXPECT_GT(seconds(biased, pass, Backend::kCuda), seconds(after, pass, Backend::kCuda));
    EXPECT_LT(seconds(biased, pass, Backend::kCuda), 1.1 * plain);
    EXPECT_DOUBLE_EQ(seconds(biased, pass, Backend::kCpu), seconds(kProblem, pass, Backend::kCpu));
  }
  Problem ungated = kProblem;
  ungated.activation = Activation::kRelu2;
  EXPECT_LT(seconds(ungated, Pass::kBackward, Backend::kCuda),
            seconds(kProblem, Pass::kBackward, Backend::kCuda))
      << "whose w1 has half the rows";
}

TEST(Simulate, NoProductTakesLessThanTheDrawOfTheNext) {
  const auto plans = even_plans(kProblem, 1, 128);
  MachineProfile profile = made_up_profile();
  const auto seconds = [&] {
    return simulate(plans, Pass::kForward, parse_schedule("tile_m=64,tile_n=128"), profile).seconds;
  };
  profile.draw_s = 0.5;
  EXPECT_DOUBLE_EQ(seconds(), 16);
  profile.draw_s = 3;
  EXPECT_DOUBLE_EQ(seconds(), 48);
}

TEST(Simulate, TasksThatAreFewMoveTheirBytesFaster) {
  const auto plans = even_plans(kProblem, 1, 128);
  MachineProfile profile = made_up_profile();
  for (tune::GemmCost& cost : profile.gemms) cost.fixed = 0;
  profile.dispatch = {.per_byte = 1e-6, .alone = 0.25, .crowd = 4};
  const auto seconds = [&](const char* schedule) {
    return simulate(plans, Pass::kForward, parse_schedule(schedule), profile).seconds;
  };
  const double all = 1e-6 * 128 * kProblem.topk * 2 * static_cast<double>(kProblem.hidden);
  EXPECT_NEAR(seconds("pull_tokens=16"), all, 1e-9);
  EXPECT_NEAR(seconds("pull_tokens=32"), all, 1e-9);
  EXPECT_NEAR(seconds("pull_tokens=64"), all / 2, 1e-9);
  EXPECT_NEAR(seconds("pull_tokens=128"), all / 4, 1e-9);
  EXPECT_NEAR(seconds("pull_tokens=256"), all / 4, 1e-9);
}

TEST(Simulate, OfReduceTheTokenBlocksAreCounted) {
  const auto plans = even_plans(kProblem, 1, 128);
  MachineProfile profile = made_up_profile();
  profile.reduce = {.per_byte = 1e-6, .alone = 0.25, .crowd = 4};
  const auto seconds = [&](const std::string& token_block) {
    const Schedule s = parse_schedule("tile_m=64,tile_n=128,token_block=" + token_block);
    return simulate(plans, Pass::kForward, s, profile).seconds;
  };
  const double products = 16;  // a second each, longer than memory takes for them
  const double all = 1e-6 * 128 * (kProblem.topk + 1) * 2 * static_cast<double>(kProblem.hidden);
  EXPECT_NEAR(seconds("16"), products + all, 1e-9);
  EXPECT_NEAR(seconds("32"), products + all, 1e-9);
  EXPECT_NEAR(seconds("64"), products + all / 2, 1e-9);
  EXPECT_NEAR(seconds("128"), products + all / 4, 1e-9);
}

TEST(Simulate, ACostOfOneWidthOfTilesComesBeforeThatOfAny) {
  const auto plans = even_plans(kProblem, 1, 128);
  MachineProfile profile = made_up_profile();
  const std::vector<tune::GemmCost> of_any = profile.gemms;
  std::vector<tune::GemmCost> both = of_any;
  for (tune::GemmCost cost : of_any) {
    cost.tile_n = 128;
    cost.fixed = 2;
    both.push_back(cost);
  }
  const auto seconds = [&](const char* schedule) {
    return simulate(plans, Pass::kForward, parse_schedule(schedule), profile).seconds;
  };
  for (int order = 0; order < 2; ++order) {
    profile.gemms = both;
    EXPECT_DOUBLE_EQ(seconds("tile_m=64,tile_n=128"), 16 * 2) << order;
    EXPECT_DOUBLE_EQ(seconds("tile_m=64,tile_n=256"), 8) << order;
    std::ranges::reverse(both);
  }
}

TEST(Simulate, AWidthOfTilesThatTheProfileDoesNotKnowIsRefused) {
  const auto plans = even_plans(kProblem, 1, 128);
  expect_error(ErrorCode::kUnsupported,
               "profile h200 has no cost of stage fc1 with tile_n=64; a profile that has one is "
               "accepted",
               [&] {
                 simulate(plans, Pass::kForward, parse_schedule("tile_n=64"),
                          tune::shipped_profile("h200"));
               });
}

TEST(Simulate, WorkersShareTheWork) {
  const auto plans = even_plans(kProblem, 1, 128);
  MachineProfile profile = made_up_profile();
  profile.workers = 4;
  const Schedule s = parse_schedule("sequential,tile_m=64,tile_n=128");
  EXPECT_DOUBLE_EQ(simulate(plans, Pass::kForward, s, profile).seconds, 4);
  profile.cores = 2;  // four threads, two cores
  EXPECT_DOUBLE_EQ(simulate(plans, Pass::kForward, s, profile).seconds, 8);
}

TEST(Simulate, CostsFollowTheSizeOfTiles) {
  MachineProfile profile = made_up_profile();
  for (tune::GemmCost& cost : profile.gemms) {
    cost.fixed = 0;
    cost.per_mnk = 1e-6;
  }
  const auto plans = even_plans(kProblem, 1, 90);  // 45 rows an expert
  const double mnk = 180.0 * (2 * 128 * 256 + 256 * 128);
  for (const char* text : {"tile_m=64", "tile_m=16,tile_n=64", "sequential,tile_n=256"}) {
    EXPECT_NEAR(simulate(plans, Pass::kForward, parse_schedule(text), profile).seconds, 1e-6 * mnk,
                1e-9)
        << text;
  }
  for (const double padding : {1.0, 0.5}) {  // as a machine that computes what is not there
    profile.padding = padding;
    EXPECT_NEAR(
        simulate(plans, Pass::kForward, parse_schedule("tile_m=64,tile_n=128"), profile).seconds,
        1e-6 * mnk * (45 + padding * 19) / 45, 1e-9);
  }
}

TEST(Simulate, TheLinkCarriesWhatIsPulledAndPushed) {
  MachineProfile profile = made_up_profile();
  for (tune::GemmCost& cost : profile.gemms) cost.fixed = 0;
  profile.link.bytes_per_s = 1000;
  const auto plans = even_plans(kProblem, 2, 64);
  const Schedule s = parse_schedule("sequential");
  const double bytes = static_cast<double>(plans[0].traffic().remote_pulls * 2 * kProblem.hidden);
  const double pushed = static_cast<double>(plans[0].traffic().remote_rows * 2 * kProblem.hidden);
  EXPECT_NEAR(simulate(plans, Pass::kForward, s, profile).seconds, (bytes + pushed) / 1000,
              0.02 * (bytes + pushed) / 1000);
  // Over NICs of a tenth of that speed.
  const tune::SimulationOptions nodes{.topology = {1, 100, 0}};
  EXPECT_NEAR(simulate(plans, Pass::kForward, s, profile, nodes).seconds, (bytes + pushed) / 100,
              0.02 * (bytes + pushed) / 100);
}

TEST(Simulate, NodesAreApartWhereTheProfileHasNoLink) {
  MachineProfile profile = made_up_profile();
  for (tune::GemmCost& cost : profile.gemms) cost.fixed = 0;
  const auto plans = even_plans(kProblem, 2, 64);
  const Traffic& t = plans[0].traffic();
  const double seconds =
      static_cast<double>((t.remote_pulls + t.remote_rows) * 2 * kProblem.hidden) / 100;
  const auto under = [&](const tune::Topology& topology) {
    return simulate(plans, Pass::kForward, parse_schedule("sequential"), profile,
                    {.topology = topology})
        .seconds;
  };
  EXPECT_NEAR(under({1, 100, 0}), seconds, 0.02 * seconds);
  EXPECT_EQ(under({2, 100, 0}), 0);  // both on one node
}

// Two tiles of fc2 a rank, a second each, whose pushes take the link 4 s each.
TEST(Simulate, AGpusTileHoldsItsWorkerUntilHalfOfItsRowsHaveLeft) {
  MachineProfile profile = made_up_profile();
  const auto plans = even_plans(kProblem, 2, 64);  // 64 rows an expert, half of each rank's
  profile.link.bytes_per_s = static_cast<double>(32 * 2 * kProblem.hidden) / 4;
  profile.push_depth = 1;
  const auto waited = [&] {
    const Schedule s = parse_schedule("sequential,tile_m=64,tile_n=256");
    return simulate(plans, Pass::kForward, s, profile).stats[0][Stage::kFc2].link_s;
  };
  // The second tile is done 2 s after the first has begun, whose pushes arrive after 5.
  EXPECT_NEAR(waited(), 3, 1e-6);
  // The first is held for 2 s. The second ends after 4; the link begins with it after 5, and has
  // carried half of it after 7.
  profile.backend = Backend::kCuda;
  EXPECT_NEAR(waited(), 2 + 3, 1e-6);
}

TEST(Simulate, AWorkerAwaitsItsPushesOverNics) {
  MachineProfile profile = made_up_profile();
  profile.push_depth = 1;
  const auto plans = even_plans(kProblem, 2, 64);
  const Schedule s = parse_schedule("sequential,tile_m=64,tile_n=256");
  const double rate = static_cast<double>(32 * 2 * kProblem.hidden) / 4;
  const auto pass = simulate(plans, Pass::kForward, s, profile, {.topology = {1, rate, 0}});
  EXPECT_NEAR(pass.stats[0][Stage::kFc2].link_s, 3, 1e-6);  // as over a link of that rate
}

TEST(Simulate, OverlapHidesTheLink) {
  MachineProfile profile = made_up_profile();
  profile.workers = 4;
  profile.link.bytes_per_s = 2000;
  const auto plans = even_plans(kProblem, 2, 128);
  const auto seconds = [&](const char* text) {
    return simulate(plans, Pass::kForward, parse_schedule(text), profile).seconds;
  };
  const double sequential = seconds("sequential,pull_tokens=4,tile_m=16");
  const double single = seconds("single,pull_tokens=4,tile_m=16,dispatch_workers=1");
  EXPECT_LT(single, 0.9 * sequential);
  const tune::Prediction p = tune::predict(
      plans, Pass::kForward, parse_schedule("sequential,pull_tokens=4,tile_m=16"), profile);
  EXPECT_GT(p.exposed_s(), 0.2 * p.seconds());
  EXPECT_LT(p.exposed_s(), p.seconds());
}

TEST(Predict, WithoutCommunicationOnlyProductsTakeTime) {
  const auto plans = even_plans(kProblem, 2, 64);
  MachineProfile profile = made_up_profile();
  profile.dispatch.fixed = 5;
  profile.wake.flag_s = 3;
  profile.beside_link = 2;
  profile.link.bytes_per_s = 100;
  for (const char* text : {"sequential", "two-kernel", "single,dispatch_workers=1"}) {
    const Schedule s = parse_schedule(text);
    for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
      EXPECT_DOUBLE_EQ(tune::predict(plans, pass, s, profile).without_communication_s,
                       simulate(plans, pass, s, made_up_profile()).seconds)
          << text << ' ' << name(pass);
    }
  }
}

TEST(Simulate, AWaitingThreadLooksNowAndThen) {
  MachineProfile profile = made_up_profile();
  profile.wake = {.flag_s = 0, .first_sleep_s = 0.4, .longest_sleep_s = 0.8, .sleep_slack_s = 0.1};
  profile.workers = 2;
  // One tile of fc1, one of fc2 that waits for it: looks after 0.5 and 1.4 seconds.
  Problem p = kProblem;
  p.num_experts = 1;
  p.topk = 1;
  p.hidden = 64;
  p.intermediate = 32;
  const auto plans = even_plans(p, 1, 64);
  const Schedule s = parse_schedule("single,tile_m=64,tile_n=64,lag=4096,dispatch_workers=0");
  EXPECT_NEAR(simulate(plans, Pass::kForward, s, profile).seconds, 1.4 + 1, 1e-9);
}

TEST(Simulate, BillionsOfLooksAreNotTakenOneByOne) {
  const auto plans = even_plans(kProblem, 2, 64);
  MachineProfile profile = made_up_profile();
  profile.link.bytes_per_s = 1;  // a token takes minutes
  const auto seconds = [&] {
    return simulate(plans, Pass::kForward, parse_schedule("single,dispatch_workers=1"), profile)
        .seconds;
  };
  const double watching = seconds();
  profile.wake = {.flag_s = 0, .first_sleep_s = 1e-6, .longest_sleep_s = 1e-6, .sleep_slack_s = 0};
  EXPECT_NEAR(seconds(), watching, 1e-3);
}

/// A rank's timeline has so many tasks, each once, with its expert's number among all ranks'.
void expect_each_task_once(const PassView& v, const std::vector<TimelineEvent>& events,
                           std::int64_t tasks) {
  std::set<std::pair<Stage, std::int64_t>> seen;
  for (const TimelineEvent& e : events) {
    seen.emplace(e.stage, e.tile);
    const int expert = tune::task_numbered(v, e.stage, e.tile).expert;
    ASSERT_EQ(e.expert, expert < 0 ? -1 : v.rank * v.num_local_experts + expert) << name(e.stage);
  }
  ASSERT_EQ(static_cast<std::int64_t>(events.size()), tasks);
  ASSERT_EQ(static_cast<std::int64_t>(seen.size()), tasks);
}

TEST(Simulate, EveryScheduleEndsAndRunsEveryTaskOnce) {
  for (int seed = 1; seed <= cases(1500); ++seed) {
    RandomPass p = random_pass(static_cast<unsigned>(seed), 40);
    if (p.part != PassPart::kWhole) continue;  // the model predicts whole passes
    Rng rng(static_cast<unsigned>(seed));
    if (p.pass == Pass::kBackward && chance(rng, 40)) {
      Problem& problem = p.routing.problem;
      problem.backward_rows =
          ring_rows(p.routing.ids, problem.num_experts, problem.row_align, pick(rng, 0, 2));
      build_orders(p);
    }
    MachineProfile profile = made_up_profile();
    profile.workers = static_cast<int>(pick(rng, 1, 5));
    profile.cores = static_cast<int>(pick(rng, 0, 3));
    profile.lanes = static_cast<int>(pick(rng, 1, 3));
    profile.link.bytes_per_s = chance(rng, 50) ? 1e4 : 0;
    profile.link.exclusive = chance(rng, 50);
    profile.wake.flag_s = chance(rng, 50) ? 0.01 : 0;
    profile.enter.per_byte = 1e-6;  // ranks begin at different times
    SCOPED_TRACE(describe(static_cast<unsigned>(seed), p));
    const tune::SimulationOptions options{.topology = {}, .record_timeline = true};
    const SimulatedPass pass = simulate(p.plans, p.pass, p.schedule, profile, options);
    for (int r = 0; r < p.ranks(); ++r) {
      std::int64_t tasks = 0;
      for (int i = 0; i < num_launches(p.view(r)); ++i) {
        const Launch launch = launch_at(p.view(r), i);
        for (const TrackList* tracks : {&launch.comm, &launch.main}) {
          const QueueTable queue(p.view(r), *tracks);
          for_each_task(p.view(r), queue.view(), [&](const Task&) { ++tasks; });
        }
      }
      std::int64_t ran = 0;
      double busy = 0;
      for (const StageStats& stats : pass.stats[static_cast<std::size_t>(r)].stages) {
        ran += stats.tasks;
        busy += stats.busy_s;
      }
      ASSERT_EQ(ran, tasks);
      const auto workers = pass.stats[static_cast<std::size_t>(r)].workers;
      ASSERT_LE(busy, pass.seconds * workers * profile.lanes * (1 + 1e-9));
      expect_each_task_once(p.view(r), pass.timeline[static_cast<std::size_t>(r)], tasks);
      if (::testing::Test::HasFatalFailure()) return;
    }
    ASSERT_EQ(simulate(p.plans, p.pass, p.schedule, profile, options).seconds, pass.seconds);
  }
}

TEST(Simulate, OneRankStandsForAllOfABalancedGroup) {
  const auto spec = workload::parse_shape("qwen3-30b,tokens=8192");
  const int ranks = 4;
  const auto routing = workload::make_routing(spec, ranks, 1, 0);
  const Problem problem = workload::problem_of(spec);
  const std::vector<std::int64_t> tokens(ranks, spec.tokens);
  const MachineProfile h200 = tune::shipped_profile("h200");
  const auto all = tune::plans_to_simulate(problem, tokens, routing.topk_ids);
  const auto one = tune::plans_to_simulate(problem, tokens, routing.topk_ids, 1);
  ASSERT_EQ(all.size(), 4u);
  ASSERT_EQ(one.size(), 1u);
  for (const char* preset : {"sequential", "pipelined:2", "two-kernel", "single"}) {
    const Schedule s = parse_schedule(preset, default_schedule(Backend::kCuda));
    for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
      const double whole = simulate(all, pass, s, h200).seconds;
      EXPECT_NEAR(simulate(one, pass, s, h200).seconds, whole, 0.08 * whole)
          << preset << ' ' << name(pass);
    }
  }
}

}  // namespace
}  // namespace uniep::testing
