// Schedules as text and as points of a space: what prints parses back, what is refused says why.
#include "uniep/schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <set>

#include "base/check.h"
#include "schedule/axes.h"
#include "schedule/constraints.h"
#include "support/cases.h"
#include "support/expect_error.h"
#include "support/random_case.h"

namespace uniep::testing {
namespace {

constexpr const char* kPresetNames = "sequential, pipelined:n, two-kernel, single";

/// In the order of their declarations, with commas between.
TEST(Schedule, PrintsEveryAxisOnce) {
  for (const Backend backend : {Backend::kCpu, Backend::kCuda}) {
    const Schedule s = default_schedule(backend);
    std::string want;
    for (std::size_t i = 0; i < schedule_axes().size(); ++i) {
      const AxisInfo& axis = schedule_axes()[i];
      want += cat(i == 0 ? "" : ",", axis.name, "=", axis_value_text(axis, axis_value(s, i)));
    }
    EXPECT_EQ(to_string(s), want);
  }
  EXPECT_TRUE(to_string(Schedule{}).starts_with("launch=single,waves=1,"));
}

TEST(Schedule, DefaultsOfTheBackendsArePresetSingle) {
  EXPECT_EQ(default_schedule(Backend::kCpu), Schedule{});
  EXPECT_NE(default_schedule(Backend::kCuda), Schedule{});
  for (const Backend backend : {Backend::kCpu, Backend::kCuda}) {
    const Schedule s = default_schedule(backend);
    EXPECT_EQ(parse_schedule("single", s), s) << name(backend);
    EXPECT_EQ(invalid_reason(s, Problem{}), std::nullopt) << name(backend);
  }
}

TEST(Schedule, WhatPrintsParsesBack) {
  const int count = cases(10000);
  for (int seed = 1; seed <= count; ++seed) {
    Rng rng(static_cast<unsigned>(seed));
    Schedule s;
    for (std::size_t i = 0; i < schedule_axes().size(); ++i) {
      set_axis(s, i, random_value(rng, schedule_axes()[i]));
    }
    ASSERT_EQ(parse_schedule(to_string(s)), s) << to_string(s);
  }
}

TEST(Schedule, AssignmentsInAnyOrderFromTheDefault) {
  Schedule want;
  want.tile_n = 256;
  want.wgrad = WgradPlacement::kAfter;
  want.dispatch_join = false;
  EXPECT_EQ(parse_schedule("wgrad=after,tile_n=256,dispatch_join=no"), want);
  EXPECT_EQ(parse_schedule("tile_n=64,wgrad=after,dispatch_join=no,tile_n=256"), want)
      << "the last of several counts";
}

TEST(Schedule, AssignmentsOverAPreset) {
  Schedule want = parse_schedule("sequential");
  want.tile_m = 16;
  EXPECT_EQ(parse_schedule("sequential,tile_m=16"), want);
}

TEST(Schedule, WhatTheTextLeavesAloneIsThatOfTheBase) {
  const Schedule base = parse_schedule("tile_n=256,raster=along-n,lag=7");
  Schedule want = base;
  want.waves = 3;
  EXPECT_EQ(parse_schedule("waves=3", base), want);
  EXPECT_EQ(parse_schedule(to_string(Schedule{}), base), Schedule{}) << "it names every axis";
}

/// Whether `text` has an assignment to this axis.
bool assigns(std::string_view text, std::string_view axis) {
  return cat(",", text).find(cat(",", axis, "=")) != std::string::npos;
}

TEST(Schedule, PresetsSetTheAxesThatTheyNameAndNoOthers) {
  for (const PresetInfo& preset : schedule_presets()) {
    std::string word(preset.name);
    if (word.ends_with(":n")) word.replace(word.size() - 1, 1, "4");
    for (int seed = 1; seed <= 20; ++seed) {
      Rng rng(static_cast<unsigned>(seed));
      Schedule base;
      for (std::size_t i = 0; i < schedule_axes().size(); ++i) {
        set_axis(base, i, random_value(rng, schedule_axes()[i]));
      }
      const Schedule s = parse_schedule(word, base);
      for (std::size_t i = 0; i < schedule_axes().size(); ++i) {
        const AxisInfo& axis = schedule_axes()[i];
        const Schedule from = assigns(preset.sets, axis.name) ? parse_schedule(word) : base;
        EXPECT_EQ(axis_value(s, i), axis_value(from, i)) << word << ": " << axis.name;
      }
    }
  }
}

TEST(Schedule, Presets) {
  EXPECT_EQ(parse_schedule("single"), Schedule{});

  const Schedule sequential = parse_schedule("sequential");
  EXPECT_EQ(sequential.launch, LaunchGrouping::kSeparate);
  EXPECT_EQ(sequential.push_depth, 0) << "each push is awaited";
  EXPECT_EQ(sequential.wgrad, WgradPlacement::kSeparate);

  const Schedule two = parse_schedule("two-kernel");
  EXPECT_EQ(two.launch, LaunchGrouping::kPaired);
  EXPECT_EQ(two.waves, 1);

  for (int n = 2; n <= 16; ++n) {
    const Schedule pipelined = parse_schedule(cat("pipelined:", n));
    EXPECT_EQ(pipelined.launch, LaunchGrouping::kPipelined);
    EXPECT_EQ(pipelined.waves, n);
  }
}

TEST(Schedule, ThePresetListNamesWhatParses) {
  std::string names;
  for (const PresetInfo& preset : schedule_presets()) {
    names += cat(names.empty() ? "" : ", ", preset.name);
    EXPECT_FALSE(preset.meaning.empty());
    std::string word(preset.name);
    if (word.ends_with(":n")) word.replace(word.size() - 1, 1, "4");
    const Schedule s = parse_schedule(word);
    EXPECT_EQ(parse_schedule(to_string(s)), s);
    EXPECT_EQ(invalid_reason(s, {.row_align = 128}), std::nullopt) << word;
  }
  EXPECT_EQ(names, kPresetNames);
}

TEST(Schedule, ErrorSentences) {
  expect_invalid(
      cat("schedule is empty; a preset (", kPresetNames, ") or key=value pairs are accepted"),
      [] { parse_schedule(""); });
  for (const char* word : {"singel", "pipelined", "x", " single"}) {
    expect_invalid(cat("schedule has the word '", word, "'; a preset (", kPresetNames,
                       ") first, then key=value pairs are accepted"),
                   [&] { parse_schedule(word); });
  }
  for (const char* text : {"tile_m=32,single", "single,single"}) {
    expect_invalid(cat("schedule has the word 'single'; a preset (", kPresetNames,
                       ") first, then key=value pairs are accepted"),
                   [&] { parse_schedule(text); });
  }
  for (const char* text : {"single,", ",single", "tile_m=32,,tile_n=64", ",", "tile_m=32,"}) {
    expect_invalid(cat("schedule has the word ''; a preset (", kPresetNames,
                       ") first, then key=value pairs are accepted"),
                   [&] { parse_schedule(text); });
  }
  for (const char* n : {"", "1", "17", "-2", "two", "2x", "99999999999"}) {
    expect_invalid(cat("schedule preset pipelined:n has n='", n, "'; 2 to 16 is accepted"),
                   [&] { parse_schedule(cat("pipelined:", n)); });
  }
}

TEST(Schedule, AnUnknownAxisIsAnsweredWithAllAxes) {
  std::string names;
  for (const AxisInfo& axis : schedule_axes()) names += cat(names.empty() ? "" : ", ", axis.name);
  for (const char* key : {"tile_k", "", "Tile_m", "tile_m "}) {
    const char* near = *key == 0 ? "" : "tile_m is the nearest; ";
    expect_invalid(cat("schedule has no axis '", key, "'; ", near, "the axes are ", names),
                   [&] { parse_schedule(cat(key, "=64")); });
  }
}

TEST(Schedule, TheNearestNameIsAmongTheAnswer) {
  const auto expect_nearest = [](const char* near, const char* text) {
    try {
      parse_schedule(text);
      ADD_FAILURE() << "no error of " << text;
    } catch (const Error& e) {
      const std::string said = e.what();
      EXPECT_NE(said.find(cat("; ", near, " is the nearest; ")), std::string::npos) << said;
    }
  };
  expect_nearest("single", "sinlge");
  expect_nearest("pipelined", "piplined:4");
  expect_nearest("own-first", "rotate=own-frist");
}

TEST(Schedule, AValueOutOfRangeIsAnsweredWithTheRange) {
  expect_invalid("schedule axis waves is 17; 1 to 16 is accepted",
                 [] { parse_schedule("waves=17"); });
  expect_invalid("schedule axis waves is 0; 1 to 16 is accepted",
                 [] { parse_schedule("waves=0"); });
  expect_invalid("schedule axis workers is -1; 0 to 1024 is accepted",
                 [] { parse_schedule("workers=-1"); });
  expect_invalid("schedule axis tile_m is 48; 16 to 128, a power of two, is accepted",
                 [] { parse_schedule("tile_m=48"); });
  expect_invalid("schedule axis tile_n is 512; 64 to 256, a power of two, is accepted",
                 [] { parse_schedule("tile_n=512"); });
  expect_invalid("schedule axis token_block is 3; 0, or 1 to 256, a power of two, is accepted",
                 [] { parse_schedule("token_block=3"); });
  for (const char* value : {"", "x", "4x", "0x4", "4.0", "99999999999", " 4", "+4", "4=4"}) {
    expect_invalid(cat("schedule axis waves is '", value, "'; 1 to 16 is accepted"),
                   [&] { parse_schedule(cat("waves=", value)); });
  }
  for (const char* value : {"", "0", "Single", "both"}) {
    expect_invalid(cat("schedule axis launch is '", value,
                       "'; separate, pipelined, paired, single, waves is accepted"),
                   [&] { parse_schedule(cat("launch=", value)); });
  }
}

TEST(ScheduleAxes, EachChangesThePrintedLineAndTheScheduleAndNoOther) {
  const std::size_t count = schedule_axes().size();
  std::set<std::string> lines{to_string(Schedule{})};
  for (std::size_t i = 0; i < count; ++i) {
    const AxisInfo& axis = schedule_axes()[i];
    Schedule s;
    set_axis(s, i, axis.default_value == axis.max ? axis.min : axis.max);
    EXPECT_NE(s, Schedule{}) << axis.name;
    EXPECT_TRUE(lines.insert(to_string(s)).second) << axis.name;
    for (std::size_t j = 0; j < count; ++j) {
      if (j == i) continue;
      EXPECT_EQ(axis_value(s, j), axis_value(Schedule{}, j)) << axis.name;
    }
  }
  EXPECT_EQ(lines.size(), count + 1);
}

// A field that is added without an axis stops this from compiling, since the names on the left no
// longer are as many as the fields.
TEST(ScheduleAxes, ReachEveryField) {
  const auto [launch, waves, workers, dispatch_workers, dispatch_join, pull_tokens, dispatch_wire,
              tile_m, tile_n, expert_order, rotate, raster, band, lag, lag_tiles, head_start,
              mix_run, ready_rows, token_block, push_depth, wgrad, wgrad_run] = Schedule{};
  const int fields[] = {static_cast<int>(launch),
                        waves,
                        workers,
                        dispatch_workers,
                        dispatch_join,
                        pull_tokens,
                        static_cast<int>(dispatch_wire),
                        tile_m,
                        tile_n,
                        static_cast<int>(expert_order),
                        static_cast<int>(rotate),
                        static_cast<int>(raster),
                        band,
                        lag,
                        lag_tiles,
                        head_start,
                        mix_run,
                        ready_rows,
                        token_block,
                        push_depth,
                        static_cast<int>(wgrad),
                        wgrad_run};
  ASSERT_EQ(schedule_axes().size(), std::size(fields));
  for (std::size_t i = 0; i < std::size(fields); ++i) {
    EXPECT_EQ(axis_value(Schedule{}, i), fields[i]) << schedule_axes()[i].name;
    EXPECT_EQ(schedule_axes()[i].default_value, fields[i]) << schedule_axes()[i].name;
    EXPECT_EQ(schedule_axes()[i].cuda_default, axis_value(default_schedule(Backend::kCuda), i))
        << schedule_axes()[i].name;
  }
}

TEST(ScheduleAxes, CandidatesAreDistinctAndInRange) {
  for (std::size_t i = 0; i < schedule_axes().size(); ++i) {
    const AxisInfo& axis = schedule_axes()[i];
    EXPECT_FALSE(axis.candidates.empty()) << axis.name;
    EXPECT_FALSE(axis.meaning.empty()) << axis.name;
    for (const auto& values : {axis.candidates, axis.cuda_candidates}) {
      const std::set<int> distinct(values.begin(), values.end());
      EXPECT_EQ(distinct.size(), values.size()) << axis.name;
      for (const int value : values) {
        Schedule s;
        EXPECT_NO_THROW(set_axis(s, i, value)) << axis.name << "=" << value;
        EXPECT_EQ(axis_value(s, i), value);
      }
    }
    EXPECT_TRUE(std::ranges::count(axis.candidates, axis.default_value) == 1) << axis.name;
    EXPECT_TRUE(std::ranges::count(axis.cuda_candidates, axis.cuda_default) == 1) << axis.name;
    if (axis.choices.empty()) continue;
    EXPECT_EQ(axis.min, 0);
    EXPECT_EQ(axis.max + 1, static_cast<int>(axis.choices.size()));
    EXPECT_EQ(axis.candidates.size(), axis.choices.size()) << "all choices are worth trying";
  }
}

TEST(ScheduleAxes, NeutralValuesAreThoseOfAPassInWhichNothingOverlaps) {
  for (const Backend backend : {Backend::kCpu, Backend::kCuda}) {
    Schedule neutral;
    for (std::size_t i = 0; i < axes().size(); ++i) {
      set_axis(neutral, i, axes()[i].neutral_value(backend));  // throws where it is out of range
    }
    EXPECT_EQ(neutral_schedule(backend), neutral);
    EXPECT_EQ(parse_schedule("sequential", neutral), neutral);
    EXPECT_EQ(invalid_reason(neutral, {.row_align = 128}, Place{backend, 0}), std::nullopt);
  }
}

/// What errors say that an axis accepts.
std::string range_of(const AxisInfo& axis) {
  if (!axis.choices.empty()) {
    std::string choices;
    for (const auto& c : axis.choices) choices += cat(choices.empty() ? "" : ", ", c);
    return choices;
  }
  if (!axis.power_of_two) return cat(axis.min, " to ", axis.max);
  return cat(axis.min == 0 ? "0, or 1" : cat(axis.min), " to ", axis.max, ", a power of two,");
}

TEST(ScheduleAxes, SettingJustOutsideTheRangeIsRefusedAndChangesNothing) {
  for (std::size_t i = 0; i < schedule_axes().size(); ++i) {
    const AxisInfo& axis = schedule_axes()[i];
    for (const int value : {axis.min - 1, axis.max + 1, -2147483647 - 1, 2147483647}) {
      Schedule s;
      expect_invalid(
          cat("schedule axis ", axis.name, " is ", value, "; ", range_of(axis), " is accepted"),
          [&] { set_axis(s, i, value); });
      EXPECT_EQ(s, Schedule{});
    }
  }
}

TEST(ScheduleAxes, NumbersThatAreNoAxisAreRefused) {
  Schedule s;
  const std::size_t count = schedule_axes().size();
  for (const std::size_t axis : {count, count + 1000, std::numeric_limits<std::size_t>::max()}) {
    const std::string sentence = cat("axis is ", axis, "; 0 to ", count - 1, " is accepted");
    expect_invalid(sentence, [&] { set_axis(s, axis, 1); });
    expect_invalid(sentence, [&] { axis_value(s, axis); });
  }
  EXPECT_EQ(s, Schedule{});
}

TEST(InvalidReason, PipelinedNeedsTwoWaves) {
  Schedule s;
  s.launch = LaunchGrouping::kPipelined;
  EXPECT_STATES(invalid_reason(s, {.row_align = 128}).value_or(""),
                "launch=pipelined needs at least 2 waves, for there is nothing to overlap in one");
  s.waves = 2;
  EXPECT_EQ(invalid_reason(s, {.row_align = 128}), std::nullopt);
}

TEST(InvalidReason, TilesMustDivideTheAlignment) {
  for (int tile_m = 16; tile_m <= 128; tile_m *= 2) {
    for (int align = 16; align <= 256; align *= 2) {
      Schedule s;
      s.tile_m = tile_m;
      const auto reason = invalid_reason(s, {.row_align = align});
      if (tile_m <= align) {
        EXPECT_EQ(reason, std::nullopt);
      } else {
        EXPECT_STATES(reason.value_or(""),
                      cat("tile_m=", tile_m, " does not divide the problem's row_align=", align,
                          ", so tiles would straddle experts"));
      }
    }
  }
}

TEST(InvalidReason, ArrivalCountersMustNotPassHalfTheirRange) {
  Schedule s;
  s.token_block = 256;
  const auto with_hidden = [](std::int64_t hidden) {
    return Problem{.hidden = hidden, .intermediate = 8, .num_experts = 1, .topk = 16};
  };
  EXPECT_EQ(invalid_reason(s, with_hidden(524280)), std::nullopt);
  EXPECT_STATES(
      invalid_reason(s, with_hidden(524288)).value_or(""),
      "token_block=256 with topk=16 and hidden=524288 makes arrival counters pass 2147483647 "
      "in one pass");
  s.token_block = 0;  // 32 of a large batch, 4 of a small one
  Problem wide = with_hidden(8 * 524288);
  wide.max_tokens = 512;
  EXPECT_EQ(invalid_reason(s, wide), std::nullopt);
  wide.max_tokens = 8192;
  EXPECT_STATES(
      invalid_reason(s, wide).value_or(""),
      "token_block=32 with topk=16 and hidden=4194304 makes arrival counters pass 2147483647 "
      "in one pass");
}

TEST(InvalidReason, FieldsOutOfRangeAreNamed) {
  Schedule s;
  s.tile_m = 24;
  EXPECT_STATES(invalid_reason(s, {}).value_or(""),
                "schedule axis tile_m is 24; 16 to 128, a power of two, is accepted");
  s = {};
  s.push_depth = -1;
  EXPECT_STATES(invalid_reason(s, {}).value_or(""),
                "schedule axis push_depth is -1; 0 to 256 is accepted");
  expect_invalid("schedule cannot run: schedule axis push_depth is -1; 0 to 256 is accepted",
                 [&] { validate(s, {}); });
}

TEST(InvalidReason, AnEnumeratorThatDoesNotExistIsRefusedAndCanBePrinted) {
  Schedule s;
  s.rotate = static_cast<SourceRotation>(7);
  EXPECT_STATES(invalid_reason(s, {}).value_or(""),
                "schedule axis rotate is 7; none, own-first, next-first is accepted");
  EXPECT_NE(to_string(s).find("rotate=7,"), std::string::npos);
  s.rotate = static_cast<SourceRotation>(-1);
  EXPECT_NE(to_string(s).find("rotate=-1,"), std::string::npos);
}

}  // namespace
}  // namespace uniep::testing
