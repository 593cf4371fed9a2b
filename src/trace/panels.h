#pragma once

#include <algorithm>
#include <cmath>
#include <string>

#include "trace/palette.h"
#include "trace/plot.h"
#include "trace/svg.h"

namespace uniep::trace {

inline constexpr double kPlotWidth = 1160;
inline constexpr double kMarginLeft = 70;
inline constexpr double kMarginRight = 50;
inline constexpr double kInnerWidth = kPlotWidth - kMarginLeft - kMarginRight;

// Each panel draws itself from `top` downwards and returns where it ends.
double draw_load_panel(Svg& svg, const PlotInput& input, double top);
double draw_stage_panel(Svg& svg, const PlotInput& input, double top);
double draw_timeline_panel(Svg& svg, const PlotInput& input, double top);

/// Title and caption of a panel; returns where its contents begin.
inline double draw_panel_title(Svg& svg, double top, std::string_view title,
                               std::string_view caption) {
  svg.text(kMarginLeft, top + 16, title, {15, kTextColor, Anchor::kStart, true});
  svg.text(kMarginLeft, top + 34, caption, {12, kMutedColor});
  return top + 48;
}

/// Grid lines and numbers of a vertical axis from 0 at `bottom` to `max` at `top`.
inline void draw_y_axis(Svg& svg, double left, double right, double top, double bottom, double max,
                        std::string_view label) {
  const double step = tick_step(max, 5);
  for (int i = 0; i * step <= max * (1 + 1e-9); ++i) {
    const double y = bottom - (bottom - top) * (i * step / max);
    svg.line(left, y, right, y, i == 0 ? kAxisColor : kGridColor);
    svg.text(left - 8, y + 4, short_number(i * step), {11, kMutedColor, Anchor::kEnd});
  }
  svg.vertical_text(left - 50, (top + bottom) / 2, label, {12, kMutedColor});
}

/// The end of an axis that shows values up to `max`: the tick at or above it.
inline double axis_end(double max) {
  const double step = tick_step(max, 5);
  return max > 0 ? std::ceil(max / step - 1e-9) * step : 1;
}

/// A swatch and its word; returns where the next one goes.
inline double draw_key(Svg& svg, double x, double baseline, std::string_view color,
                       std::string_view word) {
  svg.rect(x, baseline - 10, 12, 12, color);
  svg.text(x + 17, baseline, word, {12, kTextColor});
  return x + 17 + text_width(word, 12) + 16;
}

}  // namespace uniep::trace
