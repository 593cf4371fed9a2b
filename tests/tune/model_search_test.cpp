// The search, on times that are computed: from the simulator, and from one whose machine differs
// from what the model believes.
#include "tune/search/model_search.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <thread>

#include "tune/book/model_pick.h"
#include "tune/gpu_layer.h"
#include "tune/made_up_profile.h"
#include "tune/model/cost_model.h"
#include "tune/search/race.h"

namespace uniep::tune {
namespace {

using testing::kGpu;
const Problem& kProblem = testing::kGpuLayer;
constexpr int kRanks = 4;

constexpr const char* kReduced =
    "launch=separate|pipelined|paired|single,waves=1|2,workers=0,dispatch_workers=4|8|16|32,"
    "dispatch_join=yes,pull_tokens=8|16|32,dispatch_wire=dedup,tile_m=128,tile_n=128|256,"
    "expert_order=index|heavy-first,rotate=own-first,raster=along-m,band=16,lag=1|2|4,"
    "lag_tiles=512,head_start=0|40,mix_run=0|16,ready_rows=128,token_block=32,push_depth=64,"
    "wgrad=interleaved";

std::vector<RoutingPlan> plans() {
  const auto ids = sampled_routing(kProblem, kRanks, kProblem.max_tokens, 0, 1);
  const std::vector<std::int64_t> tokens(kRanks, kProblem.max_tokens);
  return plans_to_simulate(kProblem, tokens, ids, 1);
}

/// A machine that is not what its profile says: other rates, and a cost of its own a schedule.
double true_seconds(const std::vector<RoutingPlan>& of, const Schedule& s) {
  MachineProfile truth = shipped_profile("h200");
  for (GemmCost& cost : truth.gemms) {
    if (cost.stage == Stage::kFc2) cost.per_mnk *= 1.2;
    if (cost.tile_n == 128) cost.per_mnk *= 1.05;
  }
  truth.link.bytes_per_s *= 0.85;
  truth.link.pull_bytes_per_s *= 0.9;
  truth.launch_s *= 2;
  const auto hash = std::hash<std::string>{}(to_string(s)) % 1000;
  const double quirk = 1 + 0.01 * static_cast<double>(hash) / 1000;
  return quirk * simulate(of, Pass::kForward, s, truth).seconds;
}

TEST(SearchModel, EvaluatesWithinItsLimitAndSortsWhatItFound) {
  Space space(kProblem, Pass::kForward, kGpu);
  space.restrict_to("launch=single|waves");  // where the lag has an effect
  std::atomic<int> count = 0;                // schedules are evaluated side by side
  const auto evaluate = [&](const Schedule& s) {
    ++count;
    return std::abs(s.lag - 4) + std::abs(s.dispatch_workers - 12) + 0.1 * s.waves;
  };
  const auto ranked = search_model(space, {default_schedule(Backend::kCuda)}, evaluate,
                                   {.samples = 30, .climbs = 4, .evaluations = 500});
  EXPECT_EQ(static_cast<std::size_t>(count.load()), ranked.size());
  EXPECT_LE(ranked.size(), 500u);
  for (std::size_t i = 1; i < ranked.size(); ++i) {
    EXPECT_LE(ranked[i - 1].seconds, 1.0002 * ranked[i].seconds);
  }
  EXPECT_EQ(ranked[0].schedule.lag, 4);
  EXPECT_EQ(ranked[0].schedule.dispatch_workers, 12);
  EXPECT_EQ(ranked[0].schedule.waves, 1);
}

TEST(SearchModel, EndsWithItsTimeToo) {
  const Space space(kProblem, Pass::kForward, kGpu);
  std::atomic<int> count = 0;
  const auto evaluate = [&](const Schedule& s) {
    ++count;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    return 1.0 + s.lag;
  };
  const auto ranked = search_model(space, {default_schedule(Backend::kCuda)}, evaluate,
                                   {.samples = 4000, .evaluations = 4000, .seconds = 0.1});
  EXPECT_EQ(static_cast<std::size_t>(count.load()), ranked.size());
  EXPECT_GT(ranked.size(), 0u);
  EXPECT_LT(ranked.size(), 3000u);
}

TEST(SearchModel, LeavesAloneWhatTheModelHasNoOpinionOf) {
  const Space space(kProblem, Pass::kForward, kGpu);
  const Schedule base = default_schedule(Backend::kCuda);
  const auto ranked =
      search_model(space, {base}, [&](const Schedule& s) { return 1.0 + std::abs(s.lag - 4); }, {});
  EXPECT_EQ(to_string(ranked[0].schedule), to_string(parse_schedule("lag=4", base)));
}

TEST(SearchModel, OfPointsThatAreAlikeOneIsMeasured) {
  const auto point = [](const char* axes, double seconds) {
    return Ranked{parse_schedule(axes, default_schedule(Backend::kCuda)), seconds};
  };
  const Ranked first = point("single", 1.0);
  const Ranked twin = point("lag=4", 1.005);
  const Ranked like = point("lag=4,band=8,mix_run=0", 1.005);
  const Ranked unlike = point("lag=4,band=8,mix_run=0,head_start=0", 1.005);
  const Ranked slower = point("lag=2", 1.02);
  const auto texts = [](const std::vector<Ranked>& points) {
    std::vector<std::string> all;
    for (const Ranked& r : points) all.push_back(to_string(r.schedule));
    return all;
  };
  const std::vector<Ranked> ranked = {first, twin, like, unlike, slower};
  EXPECT_EQ(texts(distinct(ranked, 9)), texts({first, unlike, slower}));
  EXPECT_EQ(texts(distinct(ranked, 2)), texts({first, unlike}));
}

// The claim of the tuner: within 2 % of the best of an exhaustive search, at no more than 5 % of
// its measurements, although the model is wrong by tens of percent.
TEST(SearchModel, PruningFindsTheBestOfAnExhaustiveSearch) {
  const auto of = plans();
  Space space(kProblem, Pass::kForward, kGpu);
  space.restrict_to(kReduced);
  double best = 1e9;
  std::int64_t points = 0;
  space.for_each([&](const Schedule& s) {
    best = std::min(best, true_seconds(of, s));
    ++points;
  });
  const MachineProfile believed = shipped_profile("h200");
  const auto ranked = search_model(
      space, {},
      [&](const Schedule& s) { return simulate(of, Pass::kForward, s, believed).seconds; }, {});
  // An exhaustive search needs the least number of rounds for each point; so does this.
  const auto count = static_cast<std::size_t>(points / 20);
  const auto measured = distinct(ranked, count);
  double found = 1e9;
  for (const Ranked& r : measured) found = std::min(found, true_seconds(of, r.schedule));
  EXPECT_GE(points, 300);
  EXPECT_LE(points, 3000) << "an axis that the text does not name has all its values";
  EXPECT_LE(measured.size(), static_cast<std::size_t>(points / 20));
  EXPECT_LE(found, 1.02 * best) << measured.size() << " of " << points << " points";
}

}  // namespace
}  // namespace uniep::tune
