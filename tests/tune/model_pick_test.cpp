// What the model picks unasked must come back soon, whatever the layer.
#include "tune/book/model_pick.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <set>

#include "tune/gpu_layer.h"
#include "tune/model/cost_model.h"

namespace uniep::tune {
namespace {

using testing::key_of;
using testing::kGpu;
using testing::kGpuLayer;

TEST(SampledRouting, IsBalancedOrFallsWithTheSkew) {
  const auto count = [](double skew) {
    std::vector<int> rows(32);
    for (const auto e : sampled_routing(kGpuLayer, 2, 2000, skew, 3)) ++rows[e];
    return rows;
  };
  for (const int rows : count(0)) EXPECT_NEAR(rows, 1000, 150);
  const auto skewed = count(1);
  EXPECT_GT(skewed[0], 4 * skewed[31]);
}

TEST(SampledRouting, NamesEveryExpertOfATokenOnceHoweverSkewed) {
  const auto ids = sampled_routing(kGpuLayer, 1, 50, 100, 3);
  ASSERT_EQ(ids.size(), 50u * 8);
  for (auto token = ids.begin(); token != ids.end(); token += 8) {
    EXPECT_EQ(std::set<std::int32_t>(token, token + 8).size(), 8u);
  }
}

TEST(SampledRouting, RepeatsExpertsWhereThereAreTooFew) {
  Problem few = kGpuLayer;
  few.num_experts = 2;
  for (const auto e : sampled_routing(few, 2, 10, 0, 1)) EXPECT_LT(e, 2);
}

TEST(SampledRouting, OfGatheredTokensHasTheSlotsOfOneHost) {
  Problem gathered = kGpuLayer;
  gathered.gathered_hosts = 4;
  const auto ids = sampled_routing(gathered, 2, 2000, 0, 3);
  ASSERT_EQ(ids.size(), 2u * 2000 * 8);
  const auto dropped = static_cast<double>(std::ranges::count(ids, -1));
  EXPECT_NEAR(dropped / static_cast<double>(ids.size()), 0.75, 0.02);
  EXPECT_LT(std::ranges::max(ids), gathered.num_experts);
}

struct PickCase {
  const char* what;
  std::int64_t max_tokens;
  int num_experts;
  double skew;
  int topk = kGpuLayer.topk;
  int gathered_hosts = 1;
};

class QuickPick : public ::testing::TestWithParam<PickCase> {};
INSTANTIATE_TEST_SUITE_P(
    Layers, QuickPick,
    ::testing::Values(PickCase{"no tokens", 0, 32, 0}, PickCase{"one token", 1, 32, 0},
                      PickCase{"more tokens than any GPU holds", 1 << 26, 32, 0},
                      PickCase{"fewer experts than topk", 64, 4, 0},
                      PickCase{"all rows on one rank", 4096, 32, 20},
                      PickCase{"three hosts", 24, 32, 0, 8, 3},
                      PickCase{"two hosts, topk 6", 1 << 15, 32, 0, 6, 2}));

TEST_P(QuickPick, CanRunAndComesBack) {
  Problem problem = kGpuLayer;
  problem.max_tokens = GetParam().max_tokens;
  problem.num_experts = GetParam().num_experts;
  problem.topk = GetParam().topk;
  problem.gathered_hosts = GetParam().gathered_hosts;
  TuneKey key = key_of(4, problem);
  key.skew = GetParam().skew;
  const auto start = std::chrono::steady_clock::now();
  for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
    key.pass = pass;
    const Schedule pick = quick_pick(problem, key, kGpu, shipped_profile("h200"));
    EXPECT_EQ(invalid_reason(pick, problem, kGpu), std::nullopt) << GetParam().what;
  }
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  EXPECT_LT(took.count(), 60) << GetParam().what;
  RecordProperty("seconds", std::to_string(took.count()));
}

TEST(ModelPick, LetsMoreWorkersDispatchWhereAllIsCopiedWithinAGpu) {
  Problem problem = kGpuLayer;
  problem.max_tokens = 8192;
  const MachineProfile h200 = shipped_profile("h200");
  const Schedule alone = quick_pick(problem, key_of(1, problem), kGpu, h200);
  EXPECT_EQ(alone,
            parse_schedule("dispatch_workers=64,pull_tokens=4", default_schedule(Backend::kCuda)));
  EXPECT_LE(quick_pick(problem, key_of(4, problem), kGpu, h200).dispatch_workers, 32);
}

/// A ring that fits the real tokens may be too small for those of the key, which are more.
TEST(ModelPick, TakesRingsForAsLargeAsItsRoutingNeeds) {
  Problem problem = kGpuLayer;
  problem.backward_rows = 128;
  const MachineProfile h200 = shipped_profile("h200");
  for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
    tune::TuneKey key = key_of(4, problem);
    key.pass = pass;
    EXPECT_FALSE(invalid_reason(quick_pick(problem, key, kGpu, h200), problem, kGpu));
  }
}

/// Seconds of a forward pass on four GPUs, of the routing that a pick is made for.
double seconds_of_pick(Problem problem, const Schedule& schedule, const MachineProfile& profile) {
  constexpr int kRanks = 4;
  problem.capacity_rows = rows_of_any_routing(problem, kRanks);
  const std::vector<std::int64_t> tokens(kRanks, problem.max_tokens);
  const auto ids = sampled_routing(problem, kRanks, problem.max_tokens, 0, 1);
  const auto plans = plans_to_simulate(problem, tokens, ids);
  return simulate(plans, Pass::kForward, schedule, profile).seconds;
}

/// With tasks of the sizes of whole batches, few SMs would dispatch or sum few tokens.
TEST(ModelPick, LeavesSizesOpenWhereTokensAreFew) {
  Problem problem = kGpuLayer;
  problem.max_tokens = 256;
  const MachineProfile h200 = shipped_profile("h200");
  const Schedule pick = quick_pick(problem, key_of(4, problem), kGpu, h200);
  EXPECT_EQ(pick.pull_tokens, 0);
  EXPECT_EQ(pick.token_block, 0);

  const auto seconds = [&](const char* text) {
    return seconds_of_pick(problem, parse_schedule(text, default_schedule(Backend::kCuda)), h200);
  };
  EXPECT_LT(seconds("single"), 0.9 * seconds("single,pull_tokens=8,token_block=32"));
}

/// mixtral-8x7b with a few tokens: fc2 has 16 tiles of 256 columns for each of two experts, so that
/// a hundred SMs would not read weights. Backward most tiles are of weight gradients, each done
/// before the next is drawn: there narrow ones take a third longer (docs/research/cost_model.md).
TEST(ModelPick, TakesNarrowTilesWhereWideOnesAreTooFewButNotWhereTilesAreShort) {
  Problem problem{.hidden = 4096, .intermediate = 14336, .num_experts = 8, .topk = 2};
  const MachineProfile h200 = shipped_profile("h200");
  const auto columns = [&](std::int64_t tokens, Pass pass) {
    problem.max_tokens = tokens;
    TuneKey key = key_of(4, problem);
    key.pass = pass;
    return quick_pick(problem, key, kGpu, h200).tile_n;
  };
  EXPECT_EQ(columns(64, Pass::kForward), 128);
  EXPECT_EQ(columns(64, Pass::kBackward), 256);
  EXPECT_EQ(columns(8192, Pass::kForward), 256);
  EXPECT_EQ(columns(8192, Pass::kBackward), 256);
}

TEST(ModelPick, LeavesTheDefaultOnlyForWhatIsFasterByMoreThanTheModelErrs) {
  // A pull takes a dispatching warp a second: with more warps the pass is much faster.
  MachineProfile slow = shipped_profile("h200");
  const TuneKey key = key_of(4);
  const Schedule base = default_schedule(Backend::kCuda);
  slow.dispatch.per_item = 1;
  const Schedule pick = quick_pick(kGpuLayer, key, kGpu, slow);
  EXPECT_NE(pick, base);
  // Where everything takes no time but one fixed part, nothing is faster by that much.
  MachineProfile fixed = shipped_profile("h200");
  fixed.enter.fixed = 10;
  EXPECT_EQ(quick_pick(kGpuLayer, key, kGpu, fixed), base);
}

/// A part that all schedules have alike makes what one gains over another as small as is wanted.
TEST(ModelPick, DoubtsGainsOfLessThanFourPercent) {
  MachineProfile machine = shipped_profile("h200");
  machine.dispatch.per_item = 1;
  const Schedule base = default_schedule(Backend::kCuda);
  const Schedule rival = quick_pick(kGpuLayer, key_of(4), kGpu, machine);
  const double before = seconds_of_pick(kGpuLayer, base, machine);
  const double gained = before - seconds_of_pick(kGpuLayer, rival, machine);
  const double enter = machine.enter.fixed;
  const auto pick_that_gains = [&](double share) {
    machine.enter.fixed = enter + gained / share - before;
    return quick_pick(kGpuLayer, key_of(4), kGpu, machine);
  };
  EXPECT_EQ(pick_that_gains(0.041), rival);
  EXPECT_EQ(pick_that_gains(0.039), base);
}

}  // namespace
}  // namespace uniep::tune
