#include "simulate/scaling_plot.h"

#include <algorithm>

#include "base/check.h"
#include "common/table.h"
#include "trace/numbers.h"
#include "trace/palette.h"

namespace uniep::tool {
namespace {

using trace::Anchor;
using trace::kInnerWidth;
using trace::kMarginLeft;
using trace::Svg;

constexpr double kHeight = 320;
constexpr double kGap = 36;
constexpr trace::TextStyle kTick{11, trace::kMutedColor, Anchor::kMiddle};
constexpr trace::TextStyle kNode{10, trace::kMutedColor, Anchor::kMiddle};

/// One panel's place and scale.
struct Frame {
  double left, width, top, bottom;
  trace::Axis axis;
  trace::TimeUnit unit;
  std::size_t columns;
  const char* format;  ///< of the times on the columns

  double slot() const { return width / static_cast<double>(columns); }
  double middle(std::size_t i) const { return left + slot() * (static_cast<double>(i) + 0.5); }
  double height(double seconds) const {
    return (bottom - top) * seconds * unit.per_second / axis.end;
  }
};

/// Nodes of the ranks of column `i`.
int nodes(const ScalingInput& input, std::size_t i) {
  const int per_node = input.gpus_per_node;
  return per_node == 0 ? 1 : (input.ranks[i] + per_node - 1) / per_node;
}

bool has_several_nodes(const ScalingInput& input) {
  return nodes(input, input.ranks.size() - 1) > 1;
}

/// A ground behind the columns of several nodes, and a line where they begin.
void draw_nodes(Svg& svg, const Frame& frame, const ScalingInput& input) {
  std::size_t first = 0;
  while (first < frame.columns && nodes(input, first) == 1) ++first;
  if (first == frame.columns) return;
  const double x = frame.left + frame.slot() * static_cast<double>(first);
  svg.rect(x, frame.top, frame.left + frame.width - x, frame.bottom - frame.top, trace::kBandColor);
  if (first > 0) svg.line(x, frame.top, x, frame.bottom + 34, trace::kMutedColor, 1, true);
}

/// Time without exposed communication, and that on top of it.
void draw_column(Svg& svg, const Frame& frame, const ScalingCurve& curve, std::size_t i,
                 int ranks) {
  const double seconds = curve.seconds[i];
  const double exposed = std::clamp(curve.exposed[i], 0.0, seconds);
  const double width = std::min(0.62 * frame.slot(), 56.0);
  const double x = frame.middle(i) - width / 2;
  const double whole = frame.height(seconds), above = frame.height(exposed);
  const std::string tooltip =
      cat(curve.name, ", ", ranks, ranks == 1 ? " rank: " : " ranks: ", trace::short_time(seconds),
          ", of this exposed ", trace::short_time(exposed));
  svg.rect(x, frame.bottom - whole, width, above, trace::kExposedFill, tooltip);
  svg.rect(x, frame.bottom - whole + above, width, whole - above, trace::kTimeColor, tooltip);
  svg.text(frame.middle(i), frame.bottom - whole - 5,
           formatted(frame.format, seconds * frame.unit.per_second),
           {11, trace::kTextColor, Anchor::kMiddle, true});
}

void draw_ticks(Svg& svg, const Frame& frame, const ScalingInput& input) {
  for (std::size_t i = 0; i < frame.columns; ++i) {
    svg.text(frame.middle(i), frame.bottom + 16, cat(input.ranks[i]), kTick);
    if (!has_several_nodes(input)) continue;
    const int count = nodes(input, i);
    svg.text(frame.middle(i), frame.bottom + 30, cat(count, count == 1 ? " node" : " nodes"),
             kNode);
  }
  svg.text(frame.left + frame.width / 2, frame.bottom + (has_several_nodes(input) ? 49 : 36),
           has_several_nodes(input)
               ? cat("ranks (GPUs), up to ", input.gpus_per_node, " of them in a node")
               : std::string("ranks (GPUs)"),
           {12, trace::kMutedColor, Anchor::kMiddle});
}

void draw_curve(Svg& svg, const Frame& frame, const ScalingInput& input,
                const ScalingCurve& curve) {
  svg.text(frame.left, frame.top - 16, curve.name, {15, trace::kTextColor, Anchor::kStart, true});
  draw_nodes(svg, frame, input);
  const bool leftmost = frame.left == kMarginLeft;
  trace::draw_y_axis(svg, frame.left, frame.left + frame.width, frame.top, frame.bottom, frame.axis,
                     leftmost ? cat("predicted time of a pass, ", frame.unit.name) : "");
  for (std::size_t i = 0; i < frame.columns; ++i) {
    draw_column(svg, frame, curve, i, input.ranks[i]);
  }
  draw_ticks(svg, frame, input);
}

double draw_legend(Svg& svg, const ScalingInput& input, double baseline) {
  std::vector<trace::Key> keys = {
      {trace::kTimeColor, "computing, with the communication that it hides"},
      {trace::kExposedFill, "exposed communication: what it adds to the time"}};
  if (has_several_nodes(input)) {
    keys.push_back({trace::kBandColor, cat("several nodes, connected by ", input.between_nodes)});
  }
  return trace::draw_keys(svg, kMarginLeft, baseline, keys);
}

/// The decimals with which the longest time has three digits.
const char* three_digits(double longest) {
  return longest >= 99.95 ? "%.0f" : longest >= 9.995 ? "%.1f" : "%.2f";
}

double slowest_seconds(const ScalingInput& input) {
  double slowest = 0;
  for (const ScalingCurve& curve : input.curves) {
    slowest = std::max(slowest, std::ranges::max(curve.seconds));
  }
  return slowest;
}

}  // namespace

std::string draw_scaling(const ScalingInput& input) {
  Svg svg;
  double y = trace::draw_head(svg, input.page) + 6;
  y = draw_legend(svg, input, y + 4) + 28;
  const auto count = static_cast<double>(input.curves.size());
  const double width = (kInnerWidth - kGap * (count - 1)) / count;
  const double slowest = slowest_seconds(input);
  const trace::TimeUnit unit = trace::time_unit(slowest);
  // The number on top of the highest column needs room below the end of the axis.
  const trace::Axis axis = trace::axis_up_to(1.06 * slowest * unit.per_second);
  double left = kMarginLeft;
  for (const ScalingCurve& curve : input.curves) {
    const Frame frame{left,
                      width,
                      y,
                      y + kHeight,
                      axis,
                      unit,
                      input.ranks.size(),
                      three_digits(slowest * unit.per_second)};
    draw_curve(svg, frame, input, curve);
    left += width + kGap;
  }
  return trace::document(svg, input.page, trace::draw_foot(svg, input.page, y + kHeight + 62));
}

}  // namespace uniep::tool
