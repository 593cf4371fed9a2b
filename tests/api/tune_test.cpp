// Searches for schedules through the library, on the caller's tensors.
#include "uniep/tune.h"

#include <gtest/gtest.h>

#include <array>
#include <limits>
#include <stdexcept>
#include <thread>

#include "api/compared_results.h"
#include "base/check.h"
#include "support/expect_error.h"
#include "support/layer_group.h"
#include "support/process_group.h"
#include "support/tuned_cache.h"
#include "tune/book/tune_key.h"

namespace uniep::testing {
namespace {

/// Ends with its rounds, of which there are enough to tell, however slow the machine is.
TuneOptions short_search() { return {.budget_s = 3600, .candidates = 2, .max_rounds = 12}; }

struct Tuned : LayerGroup {
  explicit Tuned(int ranks, bool main_grad = false)
      : LayerGroup(plain_layer(ranks), ranks, main_grad) {
    make_layers();
    make_plans();
    each([&](int rank) { forward(rank); });
  }

  TuneResult tune(int rank, Pass pass, const TuneOptions& options) {
    return pass == Pass::kForward
               ? tune_forward(layer(rank), plan(rank), forward_args(rank), options)
               : tune_backward(layer(rank), saved(rank), backward_args(rank), options);
  }

  /// On all ranks, which must find the same.
  TuneResult tune(Pass pass, const TuneOptions& options) {
    std::vector<TuneResult> found(static_cast<std::size_t>(ranks()));
    each([&](int rank) { found[static_cast<std::size_t>(rank)] = tune(rank, pass, options); });
    for (const TuneResult& other : found) {
      EXPECT_EQ(other.schedule, found[0].schedule);
      EXPECT_EQ(other.seconds, found[0].seconds);
      EXPECT_EQ(other.why, found[0].why);
      EXPECT_EQ(other.stored, found[0].stored);
    }
    return found[0];
  }
};

void expect_found(const TuneResult& found, const Problem& problem) {
  const Place place = tune::this_place(Backend::kCpu);
  EXPECT_FALSE(invalid_reason(found.schedule, problem, place)) << to_string(found.schedule);
  EXPECT_EQ(found.rejected, 0);
  EXPECT_GE(found.candidates, 6);
  EXPECT_GE(found.rounds, 5) << "before which nothing is decided";
  EXPECT_GT(found.seconds, 0);
  EXPECT_GT(found.default_seconds, 0);
  EXPECT_FALSE(found.stopped);
  EXPECT_FALSE(found.why.empty());
  EXPECT_EQ(found.problem, "");
  EXPECT_TRUE(found.faster || found.schedule == default_schedule(Backend::kCpu));
}

class TuneLayer : public ::testing::TestWithParam<int> {};

TEST_P(TuneLayer, FindsAScheduleThatLayersTakeFromThenOn) {
  const TunedCache cache;
  Tuned group(GetParam());
  const auto before = group.layer(0).schedule(Pass::kForward);
  for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
    const TuneResult found = group.tune(pass, short_search());
    expect_found(found, group.split().problem());
    EXPECT_TRUE(found.stored);
    EXPECT_EQ(group.layer(0).schedule(Pass::kForward), before) << "the layer stays as it is";
    Tuned later(GetParam());
    for (int r = 0; r < GetParam(); ++r) {
      EXPECT_EQ(later.layer(r).schedule(pass), found.schedule);
    }
  }
  EXPECT_EQ(tune::TuneCache(cache.path()).load().entries.size(), 2u);
  EXPECT_EQ(cache.files(), 2u) << "the cache and its lock, no session";
  group.expect_contract("after the searches, the results of a pass");
}

TEST_P(TuneLayer, LeavesGradientsThatAreAddedToAsTheyWere) {
  const TunedCache cache;
  Tuned group(GetParam(), true);
  group.result().main_dw1.assign(group.result().main_dw1.size(), 0.5f);
  group.result().main_dw2.assign(group.result().main_dw2.size(), -0.25f);
  const LayerResult before = group.result();
  const TuneResult found = group.tune(Pass::kBackward, short_search());
  expect_found(found, group.split().problem());
  EXPECT_EQ(group.result().main_dw1, before.main_dw1);
  EXPECT_EQ(group.result().main_dw2, before.main_dw2);
  EXPECT_NE(
      std::memcmp(group.result().dx.data(), before.dx.data(), before.dx.size() * sizeof(bf16)), 0)
      << "dx is written";
}

INSTANTIATE_TEST_SUITE_P(Ranks, TuneLayer, ::testing::Values(1, 2, 4));

TEST(Tune, StoresNothingUnasked) {
  const TunedCache cache;
  Tuned group(2);
  TuneOptions options = short_search();
  options.store = false;
  const TuneResult found = group.tune(Pass::kForward, options);
  EXPECT_FALSE(found.stored);
  EXPECT_EQ(cache.files(), 0u);
}

TEST(Tune, TriesOnlyTheSpaceThatIsAskedFor) {
  Tuned group(2);
  TuneOptions options = short_search();
  options.store = false;
  options.space = "tile_m=16,launch=single";
  const TuneResult found = group.tune(Pass::kForward, options);
  EXPECT_EQ(found.candidates, 1 + options.candidates) << "the presets have other tiles";
  EXPECT_TRUE(!found.faster || found.schedule.tile_m == 16);
}

void expect_names(const std::string& sentence, const std::string& part) {
  EXPECT_NE(sentence.find(part), std::string::npos) << sentence << "\nshould name " << part;
}

/// All ranks get the error, and afterwards the layers go on.
void expect_refused(const TuneOptions& options, const std::string& sentence) {
  Tuned group(2);
  const auto outcomes = group.attempt([&](int rank) { group.tune(rank, Pass::kForward, options); });
  for (const Outcome& outcome : outcomes) {
    ASSERT_TRUE(outcome.error) << sentence;
    expect_names(outcome.what(), sentence);
    EXPECT_EQ(static_cast<int>(outcome.error->code()),
              static_cast<int>(ErrorCode::kInvalidArgument));
  }
  group.expect_step_works("after an error");
}

TEST(Tune, OptionsThatCannotBeUsedAreNamed) {
  const TunedCache cache;
  expect_refused({.budget_s = 0.01}, "options.budget_s is 0.01; 0.1 to");
  expect_refused({.budget_s = std::numeric_limits<double>::quiet_NaN()}, "options.budget_s is nan");
  expect_refused({.candidates = 0}, "options.candidates is 0; 1 to");
  expect_refused({.max_rounds = 0}, "options.max_rounds is 0; 1 to");
  expect_refused({.skew = -1}, "options.skew is -1; 0 to");
  expect_refused({.space = "nothing=1"}, "'nothing'");
  expect_refused({.profile = "abacus"}, "'abacus'");
  expect_refused({.profile = "h200"}, "options.profile h200 is of backend cuda");
}

TEST(Tune, ABudgetThatDoesNotReachForARoundSaysWhichWould) {
  const TunedCache cache;
  expect_refused({.budget_s = 0.1, .candidates = 1000}, "options.budget_s is 0.1, and");
  EXPECT_TRUE(tune::TuneCache(cache.path()).load().entries.empty());
}

/// As every other wait of the layer, not only as the environment says.
TEST(Tune, WaitsAsLongAsItsLayerDoes) {
  const TunedCache cache;
  LayerGroup group(plain_layer(2), 2);
  group.make_layers([](int) { return LayerOptions{.timeout_ms = 1000}; });
  group.make_plans();
  const auto outcomes = group.attempt([&](int rank) {
    if (rank == 1) return;  // never comes
    (void)tune_forward(group.layer(0), group.plan(0), group.forward_args(0), short_search());
  });
  expect_names(outcomes[0].what(), "wait expired after 1000 ms");
}

TEST(Tune, OptionsThatDifferByRankAreRefused) {
  const TunedCache cache;
  Tuned group(2);
  for (const Outcome& outcome : group.attempt(
           [&](int rank) { group.tune(rank, Pass::kForward, {.candidates = 3 + rank}); })) {
    expect_names(outcome.what(), "candidates 4");
  }
  group.expect_step_works("after an error");
}

/// Gradients that are added to are kept for the time of the search, which begins with checks.
TEST(Tune, MainGradientsThatCannotBeReadAreRefusedOnAllRanks) {
  const TunedCache cache;
  Tuned group(2, true);
  for (const std::size_t size : {group.result().main_dw1.size(), std::size_t{1} << 60}) {
    const auto outcomes = group.attempt([&](int rank) {
      BackwardArgs args = group.backward_args(rank);
      if (rank == 1)
        args.dw1 = ExpertMatrices<float>(std::span(static_cast<float*>(nullptr), size));
      tune_backward(group.layer(rank), group.saved(rank), args, short_search());
    });
    for (const Outcome& outcome : outcomes) expect_names(outcome.what(), "rank 1: dw1 has ");
  }
  group.expect_step_works("after refusals");
}

TEST(Tune, ACacheThatCannotBeWrittenIsSaidBeforeTheSearch) {
  const TemporaryFolder folder;
  Tuned group(2);
  int asked = 0;
  TuneOptions options = short_search();
  options.cache = folder.path().string();  // a folder
  options.stop = [&] { return ++asked > 0; };
  for (const Outcome& outcome :
       group.attempt([&](int rank) { group.tune(rank, Pass::kForward, options); })) {
    ASSERT_TRUE(outcome.error);
    EXPECT_EQ(static_cast<int>(outcome.error->code()), static_cast<int>(ErrorCode::kIo));
  }
  EXPECT_EQ(asked, 0);
}

TEST(Tune, AFlaggedRoutingThatDoesNotFitIsRefused) {
  const TunedCache cache;
  LayerGroup g(plain_layer(1), 1);
  Problem small = g.split().problem();
  small.capacity_rows = small.row_align;
  Layer layer(small, g.group()[0]);
  std::array<std::int64_t, 2> overflow{};
  const RoutingPlan plan = layer.plan(g.split().topk_ids(0), {.overflow = overflow.data()});
  ASSERT_EQ(uniep::Overflow{overflow[0]}, uniep::Overflow::kRows);
  try {
    tune_forward(layer, plan, g.forward_args(0), short_search());
    ADD_FAILURE() << "passes of it do nothing, and take no time";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::kCapacity) << e.what();
  }
}

TEST(Tune, LeavesTheNumberOfWavesThatTokensComeIn) {
  const TunedCache cache;
  LayerGroup g(plain_layer(1), 1);
  Problem problem = g.split().problem();
  problem.gathered_hosts = 2;
  problem.first_host = 1;
  Layer layer(problem, g.group()[0]);
  const RoutingPlan plan = layer.plan(g.split().topk_ids(0));
  const TuneResult found = tune_forward(layer, plan, g.forward_args(0), short_search());
  EXPECT_EQ(found.schedule.launch, LaunchGrouping::kWaves);
  EXPECT_EQ(found.schedule.waves, 3);
  EXPECT_GE(found.candidates, 3);
}

TEST(Tune, StartsFromADefaultThatFitsTheAlignmentOfRows) {
  const TunedCache cache;
  for (const int row_align : {16, 32}) {
    LayerGroup g(plain_layer(1), 1);
    Problem finer = g.split().problem();
    finer.row_align = row_align;
    Layer layer(finer, g.group()[0]);
    const RoutingPlan plan = layer.plan(g.split().topk_ids(0));
    TuneOptions options = short_search();
    options.stop = [calls = 0]() mutable { return ++calls > 3; };
    EXPECT_LE(tune_forward(layer, plan, g.forward_args(0), options).schedule.tile_m, row_align);
    const Saved saved = layer.forward(plan, g.forward_args(0));
    EXPECT_LE(tune_backward(layer, saved, g.backward_args(0), options).schedule.tile_m, row_align);
  }
}

TEST(Tune, CanBeStopped) {
  const TunedCache cache;
  Tuned group(2);
  for (const int last : {1, 12}) {
    int asked = 0;
    TuneOptions options = short_search();
    options.stop = [&] { return ++asked >= last; };
    const TuneResult found = group.tune(Pass::kForward, options);
    EXPECT_TRUE(found.stopped);
    EXPECT_FALSE(found.stored);
    EXPECT_EQ(found.schedule, default_schedule(Backend::kCpu)) << "too few rounds to tell";
    EXPECT_EQ(asked, last) << "on rank 0 alone";
  }
}

TEST(Tune, WhatStopThrowsEndsTheSearchOnAllRanks) {
  const TunedCache cache;
  Tuned group(3);
  TuneOptions options = short_search();
  options.stop = []() -> bool { throw std::runtime_error("out of coffee"); };
  for (const Outcome& outcome :
       group.attempt([&](int rank) { group.tune(rank, Pass::kForward, options); })) {
    expect_names(outcome.what(), "out of coffee");
    EXPECT_LT(outcome.seconds, 20);
  }
  group.expect_step_works("after an error");
}

TEST(Tune, AmongProcesses) {
  constexpr int kRanks = 2;
  const TemporaryFolder folder;
  const Common<MeetingPlace> place;
  const LayerData data = plain_layer(kRanks);
  Crew crew(kRanks, [&](int rank) {
    const workload::Split split(data, kRanks);
    LayerResult result = workload::make_result(data, {});
    Layer layer(split.problem(), Communicator::from_callbacks(place->options(rank, kRanks)));
    const RoutingPlan plan = layer.plan(split.topk_ids(rank));
    TuneOptions options = short_search();
    options.cache = folder.file("tuned.json");
    const TuneResult found = tune_forward(layer, plan, split.forward_args(rank, result), options);
    return cat(to_string(found.schedule), found.stored ? ", stored" : "", ", ", found.rejected);
  });
  const std::vector<Crew::End> ends = crew.ends();
  expect_names(ends[0].said, ", stored, 0");
  EXPECT_EQ(ends[1].said, ends[0].said);
  EXPECT_EQ(tune::TuneCache(folder.file("tuned.json")).load().entries.size(), 1u);
}

TEST(ComparedResults, SeeEveryWrongBit) {
  std::vector<bf16> overwritten(5, to_bf16(1));
  std::vector<float> added_to(3, 2.0f);
  ComparedResults results(Backend::kCpu);
  results.add(std::span(overwritten));
  results.add(WeightGrad(std::span(added_to)));
  results.hold();

  results.prepare();
  for (const bf16 v : overwritten) EXPECT_EQ(v.bits, 0xffff);
  EXPECT_EQ(added_to, std::vector<float>(3, 2.0f));
  overwritten.assign(5, to_bf16(3));
  added_to.assign(3, 7.0f);
  results.expect_this();
  EXPECT_EQ(results.count_differing(), 0);

  overwritten[4].bits ^= 1;
  EXPECT_EQ(results.count_differing(), 1);
  added_to[0] = -7.0f;
  EXPECT_EQ(results.count_differing(), 2);
  results.prepare();
  EXPECT_EQ(results.count_differing(), 8) << "nothing of the last pass is left";
  results.restore();
  EXPECT_EQ(added_to, std::vector<float>(3, 2.0f));
}

/// A search that fails ends without `restore`.
TEST(ComparedResults, RestoreGradientsWhenTheyEnd) {
  for (const bool restored : {false, true}) {
    std::vector<float> added_to(3, 2.0f);
    {
      ComparedResults results(Backend::kCpu);
      results.add(WeightGrad(std::span(added_to)));
      results.hold();
      added_to.assign(3, 7.0f);
      if (restored) results.restore();
      if (restored) added_to.assign(3, 5.0f);  // by the caller, afterwards
    }
    EXPECT_EQ(added_to, std::vector<float>(3, restored ? 5.0f : 2.0f)) << restored;
  }
}

}  // namespace
}  // namespace uniep::testing
