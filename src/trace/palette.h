#pragma once

#include <array>
#include <string_view>

#include "graph/layer_graph.h"
#include "trace/svg.h"

namespace uniep::trace {

// Stages have the colours of the graph, which differ in lightness too, for readers who do not tell
// hues apart and for print in grey (tests/trace/palette_test.cpp). What concerns w2 is hatched, and
// so is what has the colour of the stage whose work it does again: for one more tone of its own
// grey has no room.
constexpr std::string_view stage_color(Stage stage) {
  return stage == Stage::kPlan ? "#2a1d0e" : row_of(stage).look.color;
}
constexpr Fill stage_fill(Stage stage) {
  if (stage == Stage::kPlan) return {stage_color(stage), false};
  const StageRow& row = row_of(stage);
  const bool of_w2 = involves(row, Tensor::kW2) || involves(row, Tensor::kDw2);
  const bool again = row.like != Stage::kPlan && stage_color(row.like) == stage_color(stage);
  return {stage_color(stage), of_w2 || again};
}
inline constexpr std::string_view kWaitColor = "#bac2cc";
inline constexpr std::string_view kLinkColor = "#fed839";
inline constexpr std::string_view kIdleColor = "#f3f4f6";

// Ranks are named where they are drawn; alternating tones only tell neighbours apart, and keep out
// of the way of the stages' colours.
constexpr std::string_view rank_color(int rank) {
  constexpr std::array<std::string_view, 4> kColors = {"#36566f", "#7fa3b8", "#556b2f", "#a3b86c"};
  return kColors[static_cast<std::size_t>(rank) % kColors.size()];
}

// Predicted times: what is spent on computing, and what communication adds.
inline constexpr std::string_view kTimeColor = "#0e4074";
inline constexpr Fill kExposedFill = {"#f4953a", true};
/// The ground of what lies beyond one node.
inline constexpr std::string_view kBandColor = "#eef1f6";

inline constexpr std::string_view kTextColor = "#20252e";
inline constexpr std::string_view kMutedColor = "#545c69";
inline constexpr std::string_view kAxisColor = "#8c94a1";
inline constexpr std::string_view kGridColor = "#e4e7ec";
inline constexpr std::string_view kAlertColor = "#b51826";

}  // namespace uniep::trace
