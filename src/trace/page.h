#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "trace/numbers.h"
#include "trace/svg.h"

namespace uniep::trace {

inline constexpr double kPlotWidth = 1160;
inline constexpr double kMarginLeft = 84;
inline constexpr double kMarginRight = 52;
inline constexpr double kInnerWidth = kPlotWidth - kMarginLeft - kMarginRight;

/// What stands around the panels of every picture.
struct PageText {
  std::string title;
  /// Lines under the title: what went in, on which machine, program and date, command.
  std::vector<std::string> notes;
  std::string schedule;  ///< at the foot; empty: none
};

/// Title and notes; returns where the panels begin.
double draw_head(Svg& svg, const PageText& page);

/// The schedule, below `top`; returns where the picture ends.
double draw_foot(Svg& svg, const PageText& page, double top);

/// The whole document, `height` high.
std::string document(const Svg& svg, const PageText& page, double height);

/// Title and caption of a panel; returns where its contents begin.
double draw_panel_title(Svg& svg, double top, std::string_view title, std::string_view caption);

/// A sentence in the place of what there is nothing to draw of; returns where it ends.
double draw_absence(Svg& svg, double top, std::string_view sentence);

/// Lines of text from `baseline` on, broken at `width`; returns the baseline of one more.
double draw_lines(Svg& svg, double x, double baseline, std::string_view text,
                  const TextStyle& style, double width = kInnerWidth);

/// Grid lines and numbers of a vertical axis from 0 at `bottom` to its end at `top`, and to the
/// left of them the axis's name.
void draw_y_axis(Svg& svg, double left, double right, double top, double bottom, const Axis& axis,
                 std::string_view label);

struct Key {
  Fill fill;
  std::string word;
  bool round = false;  ///< of dots
};

/// Swatches and their words, in as many lines as they need within `width`; returns the baseline of
/// one more.
double draw_keys(Svg& svg, double x, double baseline, const std::vector<Key>& keys,
                 double width = kInnerWidth);

/// How wide one swatch with its word is, and the gap to the next.
double key_width(const Key& key);

}  // namespace uniep::trace
