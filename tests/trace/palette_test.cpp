#include "trace/palette.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "trace/activity.h"
#include "trace/color_vision.h"

namespace uniep::trace {
namespace {

// What one has to tell apart at a glance is well above the 2.3 that are just noticeable. Lightness
// alone has to serve eleven colours at most, from black to white, so no more than 8 are to be had.
double least_distance(const Eye& eye) { return std::string_view(eye.name) == "grey" ? 6.5 : 12; }

void expect_apart(const std::vector<std::string_view>& colors) {
  for (const Eye& eye : kEyes) {
    for (std::size_t i = 0; i < colors.size(); ++i) {
      for (std::size_t k = 0; k < i; ++k) {
        EXPECT_GE(distance(seen(eye, colors[i]), seen(eye, colors[k])), least_distance(eye))
            << colors[k] << " and " << colors[i] << ", " << eye.name;
      }
    }
  }
}

std::vector<std::string_view> colors_of(std::initializer_list<Stage> stages) {
  std::vector<std::string_view> colors = {activity_fill(kWait).color, activity_fill(kLink).color,
                                          activity_fill(kIdle).color};
  for (const Stage stage : stages) colors.push_back(stage_color(stage));
  return colors;
}

TEST(ColorVision, AgreesWithPublishedValues) {
  // Lindbloom's calculator: sRGB red, D65.
  const Triple red = lab(linear("#ff0000"));
  EXPECT_NEAR(red[0], 53.24, 0.05);
  EXPECT_NEAR(red[1], 80.09, 0.05);
  EXPECT_NEAR(red[2], 67.20, 0.05);
  EXPECT_NEAR(contrast("#000000", "#ffffff"), 21, 1e-5);
  EXPECT_NEAR(contrast("#777777", "#ffffff"), 4.48, 0.005);  // just fails AA
}

TEST(ColorVision, LeavesGreysAndConfusesWhatThoseEyesConfuse) {
  for (const Eye& eye : kEyes) {
    EXPECT_LT(distance(seen(eye, "#808080"), linear("#808080")), 0.1) << eye.name;
  }
  EXPECT_GT(distance(linear("#b0653a"), linear("#6f8a3a")), 40);
  EXPECT_LT(distance(seen(kEyes[2], "#b0653a"), seen(kEyes[2], "#6f8a3a")), 20) << "red and green";
}

TEST(Palette, StagesOfAForwardPassCanBeToldApart) {
  expect_apart(colors_of(
      {Stage::kPlan, Stage::kEnter, Stage::kDispatch, Stage::kFc1, Stage::kFc2, Stage::kReduce}));
}

TEST(Palette, StagesOfABackwardPassCanBeToldApart) {
  expect_apart(
      colors_of({Stage::kPlan, Stage::kEnter, Stage::kDispatch, Stage::kRefc1, Stage::kDfc2,
                 Stage::kDfc1, Stage::kWgrad2, Stage::kWgrad1, Stage::kReduce}));
  for (const Stage again : {Stage::kRedispatch, Stage::kExpand}) {
    EXPECT_EQ(stage_color(again), stage_color(Stage::kDispatch));
    EXPECT_TRUE(stage_fill(again).hatched);
  }
}

TEST(Palette, ProductsWithW2AreHatchedBesides) {
  for (const Stage stage : {Stage::kFc2, Stage::kDfc2, Stage::kWgrad2}) {
    EXPECT_TRUE(stage_fill(stage).hatched) << name(stage);
  }
  for (const Stage stage : {Stage::kFc1, Stage::kDfc1, Stage::kWgrad1, Stage::kDispatch}) {
    EXPECT_FALSE(stage_fill(stage).hatched) << name(stage);
  }
}

TEST(Palette, NeighbouringRanksCanBeToldApart) {
  for (int rank = 0; rank < 8; ++rank) {
    expect_apart({rank_color(rank), rank_color(rank + 1), "#ffffff"});
  }
}

TEST(Palette, PredictedTimesCanBeToldApart) {
  expect_apart({kTimeColor, kExposedFill.color, kBandColor, kAlertColor});
}

TEST(Palette, TextIsLegible) {
  for (const std::string_view ink : {kTextColor, kMutedColor, kAlertColor}) {
    for (const std::string_view ground : {std::string_view("#ffffff"), kIdleColor, kBandColor}) {
      EXPECT_GE(contrast(ink, ground), 4.5) << ink << " on " << ground;
    }
  }
}

}  // namespace
}  // namespace uniep::trace
