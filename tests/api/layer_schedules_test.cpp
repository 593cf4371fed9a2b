// What a layer runs under where its caller says nothing.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>

#include "base/check.h"
#include "support/layer_group.h"
#include "support/states.h"
#include "support/tuned_cache.h"
#include "tune/book/auto_schedule.h"

namespace uniep::testing {
namespace {

constexpr int kRanks = 3;

struct Layers : LayerGroup {
  explicit Layers(const LayerOptions& options = {}) : LayerGroup(plain_layer(kRanks), kRanks) {
    make_layers([&](int) { return options; });
  }

  /// The same on all ranks.
  Schedule schedule(Pass pass) {
    for (int r = 1; r < kRanks; ++r) EXPECT_EQ(layer(r).schedule(pass), layer(0).schedule(pass));
    return layer(0).schedule(pass);
  }

  /// A step in which no call is given a schedule.
  void expect_step_works_unasked() {
    clear_result();
    make_plans();
    each([&](int rank) {
      saved(rank) = layer(rank).forward(plan(rank), forward_args(rank));
      layer(rank).backward(saved(rank), backward_args(rank));
    });
    expect_contract("a step without schedules");
  }
};

Problem problem_of_layers() { return workload::Split(plain_layer(kRanks), kRanks).problem(); }

/// Launches of the last passes.
int launches(Layer& layer, Pass pass) {
  int last = -1;
  for (const TimelineEvent& e : layer.take_timeline()) {
    if (e.pass == pass) last = std::max(last, static_cast<int>(e.launch));
  }
  return last + 1;
}

TEST(LayerSchedule, IsTheDefaultWhereNothingIsKnown) {
  const TunedCache cache;
  Layers layers({.record_timeline = true});
  EXPECT_EQ(layers.schedule(Pass::kForward), default_schedule(Backend::kCpu));
  EXPECT_EQ(layers.schedule(Pass::kBackward), default_schedule(Backend::kCpu));
  EXPECT_TRUE(layers.layer(0).take_timeline().empty()) << "nothing may be measured";
  EXPECT_EQ(cache.files(), 0u) << "nothing is kept";
  layers.expect_step_works_unasked();
}

TEST(LayerSchedule, HasTilesThatExpertsRowsAreAlignedTo) {
  const TunedCache cache;
  const LayerData data = plain_layer(kRanks);
  const workload::Split split(data, kRanks);
  for (const int align : {16, 32}) {
    Problem problem = split.problem();
    problem.row_align = align;
    LayerResult result = workload::make_result(data, {});
    run_ranks(Communicator::cpu_group(kRanks), [&](Communicator& c) {
      Layer layer(problem, c);
      EXPECT_EQ(layer.schedule(Pass::kForward).tile_m, align);
      const RoutingPlan plan = layer.plan(split.topk_ids(c.rank()));
      const Saved saved = layer.forward(plan, split.forward_args(c.rank(), result));
      layer.backward(saved, split.backward_args(c.rank(), result));
    });
    expect_same_bits(result, reference::contract(data), cat("row_align=", align));
  }
}

TEST(LayerSchedule, IsWhatWasTunedForEachDirection) {
  const TunedCache cache;
  const Schedule forward = parse_schedule("sequential,tile_m=32");
  const Schedule backward = parse_schedule("two-kernel,lag=2");
  store_tuned(cache.path(), problem_of_layers(), kRanks, Pass::kForward, forward);
  store_tuned(cache.path(), problem_of_layers(), kRanks, Pass::kBackward, backward);
  Layers layers({.record_timeline = true});
  EXPECT_EQ(layers.schedule(Pass::kForward), forward);
  EXPECT_EQ(layers.schedule(Pass::kBackward), backward);
  layers.expect_step_works_unasked();
  EXPECT_EQ(launches(layers.layer(1), Pass::kForward), 4) << "those of sequential";
  layers.each([&](int r) {  // in two parts, of which the second is not collective
    Layer& layer = layers.layer(r);
    const BackwardArgs args = layers.backward_args(r);
    layer.backward_data(
        layers.saved(r),
        {.dy = args.dy, .w1 = args.w1, .w2 = args.w2, .dx = args.dx, .dprobs = args.dprobs});
    layer.backward_weights(layers.saved(r), {.dw1 = args.dw1, .dw2 = args.dw2});
  });
  layers.expect_contract("backward in two parts, without schedules");
  EXPECT_EQ(launches(layers.layer(1), Pass::kBackward), 3) << "two-kernel, then the weights'";
}

TEST(LayerSchedule, IsThatOfTheNearestSkewAndOfItsTokenBucket) {
  const TunedCache cache;
  const Problem problem = problem_of_layers();  // 12 tokens
  Problem fuller = problem;
  fuller.max_tokens = 16;
  Problem other_bucket = problem;
  other_bucket.max_tokens = 17;
  const auto store = [&](const Problem& p, const char* text, double skew) {
    store_tuned(cache.path(), p, kRanks, Pass::kForward, parse_schedule(text), skew);
  };
  store(other_bucket, "lag=5", 0);
  store(fuller, "lag=3", 0.5);
  store(fuller, "lag=4", 1);
  EXPECT_EQ(Layers().schedule(Pass::kForward).lag, 3);
}

TEST(LayerSchedule, OfTheOptionsComesBeforeTheCache) {
  const TunedCache cache;
  store_tuned(cache.path(), problem_of_layers(), kRanks, Pass::kForward, parse_schedule("lag=3"));
  const Schedule own = parse_schedule("two-kernel");
  Layers layers({.schedule = own});
  EXPECT_EQ(layers.schedule(Pass::kForward), own);
  EXPECT_EQ(layers.schedule(Pass::kBackward), own);
  layers.expect_step_works_unasked();
}

TEST(LayerSchedule, OfTheOptionsMustBeOneThatRunsAndTheSameOnAllRanks) {
  LayerGroup group(plain_layer(kRanks), kRanks);
  const auto make = [&](const std::function<std::optional<Schedule>(int)>& schedule) {
    return group.attempt([&](int rank) {
      const Layer layer(group.split().problem(), group.group()[static_cast<std::size_t>(rank)],
                        {.schedule = schedule(rank)});
    });
  };
  for (const Outcome& o : make([](int) { return parse_schedule("launch=pipelined"); })) {
    ASSERT_TRUE(o.error);
    EXPECT_EQ(o.error->code(), ErrorCode::kInvalidArgument);
    EXPECT_STATES(
        o.what(),
        "rank 0: options.schedule cannot run: launch=pipelined needs at least 2 waves, for "
        "there is nothing to overlap in one");
  }
  const auto on_one_rank = [](int rank) {
    return rank == 1 ? std::nullopt : std::optional<Schedule>(Schedule{});
  };
  for (const Outcome& o : make(on_one_rank)) {
    ASSERT_TRUE(o.error);
    EXPECT_EQ(o.error->code(), ErrorCode::kInvalidArgument);
    EXPECT_TRUE(
        o.what().ends_with("rank 1 calls layer without options.schedule; the same call on "
                           "every rank is accepted"))
        << o.what();
  }
  group.make_layers();
  group.expect_step_works("refused options leave the group usable");
}

TEST(LayerSchedule, PassesOverAnEntryThatCannotRunTheProblem) {
  const TunedCache cache;
  Problem problem = problem_of_layers();
  store_tuned(cache.path(), problem, kRanks, Pass::kForward, parse_schedule("tile_m=128"));
  const auto tile_m = [&](int row_align) {
    problem.row_align = row_align;
    int found = 0;
    run_ranks(Communicator::cpu_group(kRanks), [&](Communicator& c) {
      const Layer layer(problem, c);
      if (c.rank() == 0) found = layer.schedule(Pass::kForward).tile_m;
    });
    return found;
  };
  EXPECT_EQ(tile_m(64), default_schedule(Backend::kCpu).tile_m);
  EXPECT_EQ(tile_m(128), 128);
}

TEST(LayerSchedule, ADamagedCacheIsReportedOnceAndIgnored) {
  const TunedCache cache;
  write_file(cache.path(), "{");
  ::testing::internal::CaptureStderr();
  for (int i = 0; i < 3; ++i) {
    Layers layers;
    EXPECT_EQ(layers.schedule(Pass::kForward), default_schedule(Backend::kCpu));
    layers.expect_step_works_unasked();
  }
  const std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_TRUE(said.starts_with("uniep: " + cache.path() + " is ignored: ")) << said;
  EXPECT_EQ(std::ranges::count(said, '\n'), 1) << said;
  EXPECT_EQ(file_text(cache.path()), "{") << "who only looks does not touch it";
}

// Calls look nothing up: what happens to the file meanwhile does not matter.
TEST(LayerSchedule, StaysAsTheLayerWasMade) {
  const TunedCache cache;
  const Schedule tuned = parse_schedule("lag=3");
  store_tuned(cache.path(), problem_of_layers(), kRanks, Pass::kForward, tuned);
  Layers layers;
  write_file(cache.path(), "{");
  ::testing::internal::CaptureStderr();
  layers.expect_step_works_unasked();
  EXPECT_EQ(layers.schedule(Pass::kForward), tuned);
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
}

TEST(LayerSchedule, IsLookedUpInMicroseconds) {
  const TunedCache cache;
  const Problem problem = problem_of_layers();
  store_tuned(cache.path(), problem, kRanks, Pass::kForward, parse_schedule("lag=3"));
  const auto look_up = [&] {
    return tune::look_up_schedules(Backend::kCpu, problem, {1, kRanks}, 0).forward.schedule.lag;
  };
  EXPECT_EQ(look_up(), 3);
  double least = 1;
  for (int batch = 0; batch < 20; ++batch) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < 50; ++i) ASSERT_EQ(look_up(), 3);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    least = std::min(least, took.count() / 50);
  }
  EXPECT_LT(least, 200e-6);
  RecordProperty("microseconds", std::to_string(1e6 * least));
}

}  // namespace
}  // namespace uniep::testing
