#include <numeric>
#include <vector>

#include "base/check.h"
#include "base/quantile.h"
#include "trace/panels.h"

namespace uniep::trace {
namespace {

constexpr double kHeight = 170;

double mean(const std::vector<std::int64_t>& v) {
  return static_cast<double>(std::reduce(v.begin(), v.end())) / static_cast<double>(v.size());
}

std::string empty_experts(const std::vector<std::int64_t>& rows) {
  std::string list;
  std::int64_t count = 0;
  for (std::size_t e = 0; e < rows.size(); ++e) {
    if (rows[e] != 0) continue;
    if (++count <= 6) list += cat(count == 1 ? "" : ", ", e);
  }
  if (count == 0) return "";
  if (count == 1) return "; without rows (red): expert " + list;
  return cat("; without rows (red): ", count, " experts (", list, count > 6 ? ", ...)" : ")");
}

std::string caption(const PlotInput& input) {
  const auto& rows = input.rows_per_expert;
  const auto [least, most] = std::ranges::minmax(rows);
  const double average = mean(rows);
  std::string s = cat("min ", least, ", median ", short_number(median({rows.begin(), rows.end()})),
                      ", max ", most, " rows; mean ", short_number(average));
  if (average > 0) s += cat(", max / mean ", short_number(static_cast<double>(most) / average));
  return s + empty_experts(rows);
}

/// Every how many items a label of `label_width` pixels fits where an item is `slot` wide: a number
/// that reads well.
int label_every(double slot, double label_width) {
  for (const int n : {1, 2, 4, 8, 16, 32, 64, 128, 256}) {
    if (slot * n >= label_width) return n;
  }
  return 512;
}

void draw_bars(Svg& svg, const PlotInput& input, double bottom, double end) {
  const auto& rows = input.rows_per_expert;
  const auto n = static_cast<double>(rows.size());
  const double slot = kInnerWidth / n;
  const double width = std::min(0.82 * slot, 60.0);
  for (std::size_t e = 0; e < rows.size(); ++e) {
    const double middle = kMarginLeft + slot * (static_cast<double>(e) + 0.5);
    const int rank = static_cast<int>(e * static_cast<std::size_t>(input.num_ranks) / rows.size());
    const double height = kHeight * static_cast<double>(rows[e]) / end;
    svg.rect(middle - width / 2, bottom - height, width, height, rank_color(rank),
             cat("expert ", e, ", rank ", rank, ": ", rows[e], " rows"));
    if (rows[e] != 0) continue;
    const double mark = std::clamp(width, 1.5, 8.0);
    svg.rect(middle - mark / 2, bottom - 3, mark, 3, kAlertColor,
             cat("expert ", e, ", rank ", rank, ": no rows"));
  }
}

void draw_expert_numbers(Svg& svg, std::size_t experts, double y) {
  const double slot = kInnerWidth / static_cast<double>(experts);
  const auto every = static_cast<std::size_t>(label_every(slot, 26));
  for (std::size_t e = 0; e < experts; e += every) {
    svg.text(kMarginLeft + slot * (static_cast<double>(e) + 0.5), y, cat(e),
             {11, kMutedColor, Anchor::kMiddle});
  }
}

void draw_ranks(Svg& svg, int num_ranks, double y) {
  const double slot = kInnerWidth / num_ranks;
  const bool words = slot >= 52;
  const int every = label_every(slot, words ? 52 : 20);
  for (int r = 0; r < num_ranks; ++r) {
    const double x = kMarginLeft + slot * r;
    const double gap = std::min(2.0, slot / 8);
    svg.rect(x + gap, y, slot - 2 * gap, 4, rank_color(r));
    if (r % every != 0) continue;
    svg.text(x + slot / 2, y + 18, words ? cat("rank ", r) : cat(r),
             {12, kTextColor, Anchor::kMiddle});
  }
}

}  // namespace

double draw_load_panel(Svg& svg, const PlotInput& input, double top) {
  if (input.rows_per_expert.empty()) return top;
  const double inner = draw_panel_title(svg, top, "Load per expert", caption(input));
  const double bottom = inner + kHeight;
  const double right = kMarginLeft + kInnerWidth;
  const auto most = static_cast<double>(std::ranges::max(input.rows_per_expert));
  const double end = axis_end(most);
  draw_y_axis(svg, kMarginLeft, right, inner, bottom, end, "rows");
  draw_bars(svg, input, bottom, end);
  if (const double average = mean(input.rows_per_expert); average > 0) {
    const double y = bottom - kHeight * average / end;
    svg.line(kMarginLeft, y, right, y, kTextColor, 1, true);
    svg.text(right + 5, y + 4, "mean", {11, kTextColor});
  }
  draw_expert_numbers(svg, input.rows_per_expert.size(), bottom + 15);
  svg.text(kMarginLeft - 8, bottom + 15, "expert", {11, kMutedColor, Anchor::kEnd});
  draw_ranks(svg, input.num_ranks, bottom + 22);
  return bottom + 44;
}

}  // namespace uniep::trace
