#include <algorithm>
#include <numeric>
#include <vector>

#include "base/check.h"
#include "base/quantile.h"
#include "trace/numbers.h"
#include "trace/palette.h"
#include "trace/panels.h"

namespace uniep::trace {
namespace {

constexpr double kHeight = 170;
constexpr std::string_view kTitle = "Load per expert";
constexpr TextStyle kNumber{11, kMutedColor, Anchor::kMiddle};

/// Bars thinner than this are hairlines.
constexpr double kThinnestBar = 2.2;

double mean(const std::vector<std::int64_t>& v) {
  return std::reduce(v.begin(), v.end(), 0.0) / static_cast<double>(v.size());
}

/// Experts that share a bar.
std::size_t experts_per_bar(std::size_t experts) {
  std::size_t shared = 1;
  while (kInnerWidth * static_cast<double>(shared) / static_cast<double>(experts) < kThinnestBar) {
    shared *= 2;
  }
  return shared;
}

std::string empty_experts(const std::vector<std::int64_t>& rows) {
  std::string list;
  std::int64_t count = 0;
  for (std::size_t e = 0; e < rows.size(); ++e) {
    if (rows[e] != 0) continue;
    if (++count <= 6) list += cat(count == 1 ? "" : ", ", e);
  }
  if (count == 0) return "";
  if (count == 1) return "; without rows (red, below the axis): expert " + list;
  return cat("; without rows (red, below the axis): ", count, " experts (", list,
             count > 6 ? ", ...)" : ")");
}

std::string caption(const PlotInput& input) {
  const auto& rows = input.rows_per_expert;
  const auto [least, most] = std::ranges::minmax(rows);
  const double average = mean(rows);
  std::string s = cat("min ", least, ", median ", short_number(median({rows.begin(), rows.end()})),
                      ", max ", most, " rows; mean ", short_number(average), ", max / mean ",
                      short_number(static_cast<double>(most) / average), empty_experts(rows));
  const std::size_t shared = experts_per_bar(rows.size());
  if (shared > 1) {
    s += cat("; a bar stands for ", shared,
             " experts: coloured up to their mean, grey up to the fullest of them");
  }
  return s;
}

/// Every how many items a label of `label_width` pixels fits where an item is `slot` wide: a number
/// that reads well.
std::size_t label_every(double slot, double label_width) {
  std::size_t every = 1;
  while (slot * static_cast<double>(every) < label_width) every *= 2;
  return every;
}

struct Scale {
  double bottom = 0;
  double pixels_per_row = 0;

  double height(double rows) const { return rows > 0 ? std::max(0.8, rows * pixels_per_row) : 0; }
};

/// The bar of experts `first` to `last`.
void draw_bar(Svg& svg, const PlotInput& input, const Scale& scale, std::size_t first,
              std::size_t last) {
  const auto& rows = input.rows_per_expert;
  const double slot = kInnerWidth / static_cast<double>(rows.size());
  const double room = slot * static_cast<double>(last + 1 - first);
  const double width = std::min(0.82 * room, 60.0);
  const double x = kMarginLeft + slot * static_cast<double>(first) + (room - width) / 2;
  const int rank =
      static_cast<int>(first * static_cast<std::size_t>(input.num_ranks) / rows.size());
  const auto at = [&](std::size_t e) { return rows.begin() + static_cast<std::ptrdiff_t>(e); };
  const std::vector<std::int64_t> own(at(first), at(last + 1));
  const auto [least, most] = std::ranges::minmax(own);
  const std::string whose =
      first == last ? cat("expert ", first) : cat("experts ", first, " to ", last);
  const std::string tooltip = most == 0 ? cat(whose, ", rank ", rank, ": no rows")
                              : first == last
                                  ? cat(whose, ", rank ", rank, ": ", most, " rows")
                                  : cat(whose, ", rank ", rank, ": ", least, " to ", most, " rows");
  const double upper = scale.height(static_cast<double>(most)), lower = scale.height(mean(own));
  if (first < last) svg.rect(x, scale.bottom - upper, width, upper, kWaitColor, tooltip);
  svg.rect(x, scale.bottom - lower, width, lower, rank_color(rank), tooltip);
  if (least != 0) return;
  const double mark = std::clamp(width, 1.5, 10.0);
  svg.rect(x + (width - mark) / 2, scale.bottom + 1, mark, 3, kAlertColor, tooltip);
}

void draw_expert_numbers(Svg& svg, std::size_t experts, double y) {
  const double slot = kInnerWidth / static_cast<double>(experts);
  const std::size_t every = label_every(slot, text_width(cat(experts), kNumber) + 4);
  for (std::size_t e = 0; e < experts; e += every) {
    svg.text(kMarginLeft + slot * (static_cast<double>(e) + 0.5), y, cat(e), kNumber);
  }
  svg.text(kMarginLeft - 8, y, "expert", {11, kMutedColor, Anchor::kEnd});
}

void draw_ranks(Svg& svg, int num_ranks, double y) {
  constexpr TextStyle kName{12, kTextColor, Anchor::kMiddle};
  const double slot = kInnerWidth / num_ranks;
  const bool words = slot >= text_width(cat("rank ", num_ranks), kName) + 6;
  const std::size_t every = words ? 1 : label_every(slot, text_width(cat(num_ranks), kName) + 4);
  for (int r = 0; r < num_ranks; ++r) {
    const double x = kMarginLeft + slot * r;
    const double gap = std::min(2.0, slot / 8);
    svg.rect(x + gap, y, slot - 2 * gap, 4, rank_color(r));
    if (static_cast<std::size_t>(r) % every != 0) continue;
    svg.text(x + slot / 2, y + 18, words ? cat("rank ", r) : cat(r), kName);
  }
  if (!words) svg.text(kMarginLeft - 8, y + 18, "rank", {11, kMutedColor, Anchor::kEnd});
}

void draw_mean(Svg& svg, double y) {
  const double right = kMarginLeft + kInnerWidth;
  svg.line(kMarginLeft, y, right, y, kTextColor, 1, true);
  svg.text(right + 5, y + 4, "mean", {11, kTextColor});
}

}  // namespace

double draw_load_panel(Svg& svg, const PlotInput& input, double top) {
  const auto& rows = input.rows_per_expert;
  if (std::ranges::all_of(rows, [](std::int64_t r) { return r == 0; })) {
    const double inner = draw_panel_title(svg, top, kTitle, cat(rows.size(), " experts"));
    return draw_absence(svg, inner, "There is nothing to draw: no expert has a row.");
  }
  const double inner = draw_panel_title(svg, top, kTitle, caption(input));
  const double bottom = inner + kHeight;
  const Axis axis = axis_up_to(static_cast<double>(std::ranges::max(rows)), 1);
  const Scale scale{bottom, kHeight / axis.end};
  draw_y_axis(svg, kMarginLeft, kMarginLeft + kInnerWidth, inner, bottom, axis, "rows");
  const std::size_t shared = experts_per_bar(rows.size());
  for (std::size_t e = 0; e < rows.size(); e += shared) {
    draw_bar(svg, input, scale, e, std::min(e + shared, rows.size()) - 1);
  }
  draw_mean(svg, bottom - scale.pixels_per_row * mean(rows));
  draw_expert_numbers(svg, rows.size(), bottom + 17);
  draw_ranks(svg, input.num_ranks, bottom + 24);
  return bottom + 46;
}

}  // namespace uniep::trace
