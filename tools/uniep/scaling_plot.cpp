#include "scaling_plot.h"

#include <algorithm>

#include "base/check.h"
#include "trace/panels.h"

namespace uniep::tool {
namespace {

using trace::kInnerWidth;
using trace::kMarginLeft;
using trace::Svg;

constexpr double kHeight = 220;
constexpr std::string_view kTimeColor = "#1f5fa8";
constexpr std::string_view kExposedColor = "#e8862e";

/// Where a panel's values stand.
struct Frame {
  double top, bottom, max;
  std::size_t points;

  double x(std::size_t i) const {
    const auto steps = static_cast<double>(std::max<std::size_t>(1, points - 1));
    return kMarginLeft + 20 + (kInnerWidth - 40) * static_cast<double>(i) / steps;
  }
  double y(double value) const { return bottom - (bottom - top) * value / max; }
};

void draw_line(Svg& svg, const Frame& frame, const std::vector<double>& ms,
               std::string_view color) {
  for (std::size_t i = 0; i < ms.size(); ++i) {
    const double x = frame.x(i);
    const double y = frame.y(ms[i]);
    if (i > 0) svg.line(frame.x(i - 1), frame.y(ms[i - 1]), x, y, color, 2);
    svg.rect(x - 3, y - 3, 6, 6, color, trace::short_number(ms[i]) + " ms");
  }
}

std::vector<double> in_ms(std::vector<double> seconds) {
  for (double& s : seconds) s *= 1e3;
  return seconds;
}

double draw_curve(Svg& svg, double top, const ScalingCurve& curve, const std::vector<int>& ranks) {
  top = trace::draw_panel_title(svg, top, curve.name, "predicted time of a pass over ranks");
  const double slowest = std::ranges::max(in_ms(curve.seconds));
  const Frame frame{top, top + kHeight, trace::axis_end(slowest), ranks.size()};
  trace::draw_y_axis(svg, kMarginLeft, kMarginLeft + kInnerWidth, frame.top, frame.bottom,
                     frame.max, "ms");
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    svg.text(frame.x(i), frame.bottom + 16, cat(ranks[i]),
             {11, trace::kMutedColor, trace::Anchor::kMiddle});
  }
  draw_line(svg, frame, in_ms(curve.seconds), kTimeColor);
  draw_line(svg, frame, in_ms(curve.exposed), kExposedColor);
  const double key = frame.bottom + 38;
  const double next = trace::draw_key(svg, kMarginLeft, key, kTimeColor, "whole pass");
  trace::draw_key(svg, next, key, kExposedColor, "of this exposed communication");
  return key + 24;
}

}  // namespace

std::string draw_scaling(const std::string& title, const std::vector<std::string>& notes,
                         const std::vector<int>& ranks, const std::vector<ScalingCurve>& curves) {
  Svg svg;
  svg.text(kMarginLeft, 34, title, {20, trace::kTextColor, trace::Anchor::kStart, true});
  double y = 54;
  for (const std::string& note : notes) {
    svg.text(kMarginLeft, y, note, {12, trace::kMutedColor});
    y += 16;
  }
  y += 10;
  for (const ScalingCurve& curve : curves) y = draw_curve(svg, y, curve, ranks) + 16;
  return svg.document(trace::kPlotWidth, y, title);
}

}  // namespace uniep::tool
