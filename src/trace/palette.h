#pragma once

#include <array>
#include <string_view>

#include "uniep/stage.h"

namespace uniep::trace {

// Stages: communication in warm colours; a GEMM and its mirror in the backward pass are a dark and
// a light tone of one hue. They differ in lightness too, for readers who do not tell hues apart.
constexpr std::string_view stage_color(Stage stage) {
  constexpr std::array<std::string_view, kNumStages> kColors = {
      "#5c4a3d",  // plan
      "#8d7b6c",  // enter
      "#e8862e",  // dispatch
      "#1f5fa8",  // fc1
      "#5ba3dc",  // fc2
      "#1d7a56",  // dfc2
      "#6cc08b",  // dfc1
      "#6a45a3",  // wgrad2
      "#b08fd8",  // wgrad1
      "#c2334d",  // reduce
  };
  return kColors[static_cast<std::size_t>(stage)];
}
inline constexpr std::string_view kWaitColor = "#c3c8d1";
inline constexpr std::string_view kLinkColor = "#f6cf45";
inline constexpr std::string_view kIdleColor = "#f3f4f7";

// Ranks are named where they are drawn; alternating tones only tell neighbours apart, and keep out
// of the way of the stages' colours.
constexpr std::string_view rank_color(int rank) {
  constexpr std::array<std::string_view, 4> kColors = {"#36566f", "#7fa3b8", "#556b2f", "#a3b86c"};
  return kColors[static_cast<std::size_t>(rank) % kColors.size()];
}

inline constexpr std::string_view kTextColor = "#20252e";
inline constexpr std::string_view kMutedColor = "#5f6875";
inline constexpr std::string_view kAxisColor = "#8c94a1";
inline constexpr std::string_view kGridColor = "#e4e7ec";
inline constexpr std::string_view kAlertColor = "#c2334d";

}  // namespace uniep::trace
