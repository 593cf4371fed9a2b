// The order in which schedules are looked up.
#include "tune/book/schedule_book.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <map>

#include "schedule/axes.h"
#include "support/scoped_env.h"
#include "tune/files/json_fields.h"
#include "tune/files/shipped_files.h"
#include "tune/gpu_layer.h"

namespace uniep::tune {
namespace {

using testing::key_of;
using testing::kGpu;
using testing::kGpuLayer;

TEST(ScheduleBook, PrefersTheCacheThenWhatIsShippedThenTheModel) {
  const Schedule base = default_schedule(Backend::kCuda);
  const TunedEntry cached{key_of(4), parse_schedule("lag=4", base), 1, 1, ""};
  TunedEntry shipped{key_of(4), parse_schedule("lag=8", base), 1, 1, ""};
  shipped.key.driver = "another driver";
  shipped.key.library = "another version";
  const auto profile = shipped_profile_of(Backend::kCuda, key_of(4).device);
  ASSERT_TRUE(profile);
  ScheduleBook first({cached}, {shipped}, profile);
  EXPECT_EQ(first.choose(key_of(4), kGpuLayer, kGpu).origin, ChoiceOrigin::kCache);
  EXPECT_EQ(first.choose(key_of(4), kGpuLayer, kGpu).schedule, cached.schedule);
  ScheduleBook second({}, {shipped}, profile);
  EXPECT_EQ(second.choose(key_of(4), kGpuLayer, kGpu).origin, ChoiceOrigin::kShipped);
  ScheduleBook third({}, {}, profile);
  const ScheduleChoice model = third.choose(key_of(4), kGpuLayer, kGpu);
  EXPECT_EQ(model.origin, ChoiceOrigin::kModel);
  EXPECT_EQ(invalid_reason(model.schedule, kGpuLayer, kGpu), std::nullopt);
  ScheduleBook fourth({}, {}, std::nullopt);
  const ScheduleChoice none = fourth.choose(key_of(4), kGpuLayer, kGpu);
  EXPECT_EQ(none.origin, ChoiceOrigin::kDefault);
  EXPECT_EQ(none.schedule, base);
}

TEST(ScheduleBook, WhatWasTunedWithAnotherVersionCountsBehindThisOneAndAheadOfWhatIsShipped) {
  const Schedule base = default_schedule(Backend::kCuda);
  const TunedEntry shipped{key_of(4), parse_schedule("lag=8", base), 1, 1, ""};
  const auto of_version = [&](const char* version, const char* schedule, const char* date) {
    TunedEntry e{key_of(4), parse_schedule(schedule, base), 1, 1, date};
    e.key.library = version;
    return e;
  };
  const TunedEntry newer = of_version("0.0.2", "lag=2", "2026-02-01T00:00:00Z");
  const TunedEntry older = of_version("0.0.10", "lag=4", "2026-01-01T00:00:00Z");
  for (const std::vector<TunedEntry>& cached :
       {std::vector{older, newer}, std::vector{newer, older}}) {
    ScheduleBook book(cached, {shipped}, std::nullopt);
    EXPECT_EQ(book.choose(key_of(4), kGpuLayer, kGpu).origin, ChoiceOrigin::kCache);
    EXPECT_EQ(book.choose(key_of(4), kGpuLayer, kGpu).schedule, newer.schedule) << "the latest";
    TuneKey own = key_of(4);
    own.library = older.key.library;
    EXPECT_EQ(book.choose(own, kGpuLayer, kGpu).schedule, older.schedule) << "of its own version";
  }
  TunedEntry elsewhere = newer;
  elsewhere.key.driver = "another driver";
  ScheduleBook book({elsewhere}, {shipped}, std::nullopt);
  EXPECT_EQ(book.choose(key_of(4), kGpuLayer, kGpu).origin, ChoiceOrigin::kShipped);
}

TEST(ScheduleBook, WhatWasTunedForPlainExpertsServesOthersWithAGate) {
  const Schedule base = default_schedule(Backend::kCuda);
  const TunedEntry plain{key_of(4), parse_schedule("lag=8", base), 1, 1, ""};
  const auto chosen = [](ScheduleBook& book, Activation activation, Probs probs, bool bias) {
    Problem problem = kGpuLayer;
    TuneKey key = key_of(4);
    key.activation = problem.activation = activation;
    key.probs = problem.probs = probs;
    key.bias = problem.bias = bias;
    return book.choose(key, problem, kGpu);
  };
  const auto expect_of = [&](ScheduleBook& book, Activation activation, ChoiceOrigin origin,
                             const Schedule& schedule) {
    const ScheduleChoice found = chosen(book, activation, Probs::kAfter, true);
    EXPECT_EQ(found.origin, origin) << name(activation);
    EXPECT_EQ(found.schedule, schedule) << name(activation);
  };
  ScheduleBook shipped({}, {plain}, std::nullopt);
  expect_of(shipped, Activation::kGptOss, ChoiceOrigin::kShipped, plain.schedule);
  expect_of(shipped, Activation::kSwiglu, ChoiceOrigin::kShipped, plain.schedule);
  expect_of(shipped, Activation::kRelu2, ChoiceOrigin::kDefault, base);

  TunedEntry own{key_of(4), parse_schedule("lag=2", base), 1, 1, ""};
  own.key.activation = Activation::kGptOss;
  own.key.probs = Probs::kAfter;
  own.key.bias = true;
  ScheduleBook tuned({own}, {plain}, std::nullopt);
  expect_of(tuned, Activation::kGptOss, ChoiceOrigin::kCache, own.schedule);
  expect_of(tuned, Activation::kSwiglu, ChoiceOrigin::kCache, own.schedule);  // the same kernels
  EXPECT_EQ(chosen(tuned, Activation::kSwiglu, Probs::kBefore, false).schedule, plain.schedule);
  EXPECT_EQ(chosen(tuned, Activation::kGptOss, Probs::kAfter, false).schedule, plain.schedule)
      << "without biases";
}

TEST(ScheduleBook, KnowsTheMachinesThatItHasProfilesOf) {
  const auto profile_of = [](std::string_view device) {
    const auto profile = shipped_profile_of(Backend::kCuda, device);
    return profile ? profile->name : "none";
  };
  EXPECT_EQ(profile_of("NVIDIA H200 (compute capability 9.0, 132 SMs, 139.8 GiB)"), "h200");
  EXPECT_EQ(profile_of("NVIDIA H100 80GB HBM3 (compute capability 9.0, 132 SMs, 79.1 GiB)"),
            "h100");
  EXPECT_EQ(profile_of("NVIDIA H100 PCIe (compute capability 9.0, 114 SMs, 79.1 GiB)"), "none");
  EXPECT_EQ(shipped_profile_of(Backend::kCpu, "NVIDIA H200"), std::nullopt);
}

TEST(ScheduleBook, PassesRunOnTheSmsThatAreNotSpared) {
  const char* const device = "NVIDIA H200 (compute capability 9.0, 132 SMs, 139.8 GiB)";
  const auto workers = [&] { return profile_of_passes(Backend::kCuda, device)->workers; };
  EXPECT_EQ(workers(), 132);
  const uniep::testing::ScopedEnv spare("UNIEP_SPARE_SMS", "16");
  EXPECT_EQ(workers(), 116);
  EXPECT_EQ(shipped_profile_of(Backend::kCuda, device)->workers, 132);
}

TEST(ScheduleBook, FindsWhatIsShippedForH200s) {
  const TunedEntries shipped = shipped_entries();
  EXPECT_EQ(shipped.problems, std::vector<std::string>{});
  ScheduleBook book({}, shipped.entries, std::nullopt);
  for (const TunedEntry& e : shipped.entries) {
    const Problem problem{.hidden = e.key.hidden,
                          .intermediate = e.key.intermediate,
                          .num_experts = e.key.num_experts,
                          .topk = e.key.topk,
                          .max_tokens = e.key.tokens};
    TuneKey key = e.key;
    key.driver = "one of later";
    key.library = "9.9";
    const ScheduleChoice found = book.choose(key, problem, kGpu);
    EXPECT_EQ(found.origin, ChoiceOrigin::kShipped) << to_string(e.key);
    EXPECT_EQ(found.schedule, e.schedule) << "two for " << to_string(e.key);
    EXPECT_LE(e.ms, e.default_ms) << to_string(e.key);
  }
}

/// What is shipped, as it would be if no entry named this axis.
TunedEntries shipped_without(const std::string& axis) {
  TunedEntries all;
  for (const ShippedFile& shipped : shipped_schedules()) {
    Json file = parse_json(shipped.text);
    for (Json& e : file["entries"]) e["schedule"].erase(axis);
    TunedEntries older = parse_tuned(file.dump(), std::string(shipped.name));
    std::ranges::move(older.entries, std::back_inserter(all.entries));
    std::ranges::move(older.problems, std::back_inserter(all.problems));
  }
  return all;
}

TEST(ScheduleBook, WhatIsShippedOutlivesEveryAxisThatItDoesNotName) {
  const std::vector<TunedEntry> shipped = shipped_entries().entries;
  ASSERT_FALSE(shipped.empty());
  for (std::size_t i = 0; i < axes().size(); ++i) {
    const Axis& axis = axes()[i];
    const TunedEntries older = shipped_without(std::string(axis.info.name));
    EXPECT_EQ(older.problems, std::vector<std::string>{}) << axis.info.name;
    for (const TunedEntry& e : shipped) {
      const TunedEntry* found = find_entry(older.entries, e.key);
      ASSERT_NE(found, nullptr) << axis.info.name;
      Schedule expected = e.schedule;
      set_axis(expected, i, axis.neutral_value(e.key.backend));
      EXPECT_EQ(found->schedule, expected) << axis.info.name;
    }
  }
}

TEST(ScheduleBook, ShipsWhatTheDocsPromise) {
  constexpr std::int64_t kWholeBatch = 8192;  // or more
  std::map<std::pair<int, std::int64_t>, int> entries;
  for (const TunedEntry& e : shipped_entries().entries) {
    ++entries[{e.key.ranks, std::min(e.key.tokens, kWholeBatch)}];
  }
  // Both directions of five models, but of four for whole batches on one GPU.
  const decltype(entries) promised = {{{1, 64}, 10}, {{1, 512}, 10}, {{1, kWholeBatch}, 8},
                                      {{2, 64}, 10}, {{2, 512}, 10}, {{2, kWholeBatch}, 10},
                                      {{4, 64}, 10}, {{4, 512}, 10}, {{4, kWholeBatch}, 10}};
  EXPECT_EQ(entries, promised);
}

TEST(ScheduleBook, OfWhatIsShippedTheNearestSkewCountsNotTheDriver) {
  const Schedule base = default_schedule(Backend::kCuda);
  TunedEntry far{key_of(4), parse_schedule("lag=4", base), 1, 1, ""};
  TunedEntry near{key_of(4), parse_schedule("lag=8", base), 1, 1, ""};
  far.key.driver = "driver A";
  far.key.skew = 2;
  near.key.driver = "driver B";
  for (const std::vector<TunedEntry>& shipped : {std::vector{far, near}, std::vector{near, far}}) {
    ScheduleBook book({}, shipped, std::nullopt);
    EXPECT_EQ(book.choose(key_of(4), kGpuLayer, kGpu).schedule, near.schedule);
  }
}

TEST(ScheduleBook, WhatWasTunedOnAllSmsIsNotForPassesThatSpareSome) {
  const Schedule base = default_schedule(Backend::kCuda);
  const TunedEntry tuned{key_of(4), parse_schedule("lag=4", base), 1, 1, ""};
  TuneKey sparing = key_of(4);
  sparing.spare_sms = 16;
  ScheduleBook cached({tuned}, {}, std::nullopt);
  EXPECT_EQ(cached.choose(sparing, kGpuLayer, kGpu).origin, ChoiceOrigin::kDefault);
  EXPECT_EQ(cached.choose(key_of(4), kGpuLayer, kGpu).schedule, tuned.schedule);
  ScheduleBook shipped({}, {tuned}, std::nullopt);
  EXPECT_EQ(shipped.choose(sparing, kGpuLayer, kGpu).schedule, tuned.schedule);
}

TEST(ScheduleBook, PassesOverWhatCannotRunHere) {
  const Schedule base = default_schedule(Backend::kCuda);
  const TunedEntry cached{key_of(4), parse_schedule("workers=200", base), 1, 1, ""};
  ScheduleBook book({cached}, {}, std::nullopt);
  EXPECT_EQ(book.choose(key_of(4), kGpuLayer, kGpu).origin, ChoiceOrigin::kDefault);
}

TEST(ScheduleBook, AsksTheModelOnceForASituation) {
  ScheduleBook book({}, {}, shipped_profile("h200"));
  const ScheduleChoice first = book.choose(key_of(4), kGpuLayer, kGpu);
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < 1000; ++i) {
    ASSERT_EQ(book.choose(key_of(4), kGpuLayer, kGpu).schedule, first.schedule);
  }
  const std::chrono::duration<double> each = (std::chrono::steady_clock::now() - start) / 1000;
  EXPECT_LT(each.count(), 1e-3) << "a simulation takes longer";
}

TEST(ScheduleBook, TheDefaultHasTilesThatExpertsRowsAreAlignedTo) {
  const Place cpu{Backend::kCpu, 0};
  TuneKey key = key_of(2);
  key.backend = Backend::kCpu;
  Problem finer = kGpuLayer;
  for (const int align : {16, 32, 64, 128}) {
    finer.row_align = align;
    ScheduleBook book({}, {}, std::nullopt);
    const ScheduleChoice choice = book.choose(key, finer, cpu);
    EXPECT_EQ(choice.origin, ChoiceOrigin::kDefault);
    EXPECT_EQ(choice.schedule.tile_m, std::min(64, align));
    EXPECT_FALSE(invalid_reason(choice.schedule, finer, cpu));
  }
}

TEST(ScheduleBook, TheModelIsNotAskedWhereTheBackendsTilesDoNotFit) {
  Problem finer = kGpuLayer;
  finer.row_align = 64;
  ScheduleBook book({}, {}, shipped_profile("h200"));
  const ScheduleChoice choice = book.choose(key_of(4), finer, kGpu);
  EXPECT_EQ(choice.origin, ChoiceOrigin::kDefault);
  EXPECT_TRUE(invalid_reason(choice.schedule, finer, kGpu)) << "tiles are of 128 rows";
}

TEST(ScheduleBook, WhatOneProblemCannotRunAnotherOfTheSameKeyCan) {
  const Place cpu{Backend::kCpu, 0};
  const Schedule tuned = parse_schedule("tile_m=128");
  TuneKey key = key_of(2);
  key.backend = Backend::kCpu;
  ScheduleBook book({{key, tuned, 1, 1, ""}}, {}, std::nullopt);
  Problem finer = kGpuLayer;
  finer.row_align = 64;
  EXPECT_EQ(book.choose(key, finer, cpu).origin, ChoiceOrigin::kDefault);
  EXPECT_EQ(book.choose(key, kGpuLayer, cpu).schedule, tuned);
  EXPECT_EQ(book.choose(key, finer, cpu).schedule, default_schedule(Backend::kCpu));
}

}  // namespace
}  // namespace uniep::tune
