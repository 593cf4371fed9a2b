#include "tuning/survey_plot.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "common/table.h"
#include "trace/numbers.h"
#include "trace/palette.h"

namespace uniep::tool {
namespace {

using trace::Anchor;
using trace::kMarginLeft;
using trace::Svg;

constexpr double kSide = 560;
constexpr double kAsideLeft = kMarginLeft + kSide + 160;
constexpr std::string_view kPickColor = "#f4953a";
constexpr std::string_view kBestColor = "#b51826";

/// Both axes, which are the same, in their unit: seconds times `per_second`.
struct Scale {
  double left, top;
  double from, to, step;
  trace::TimeUnit unit;

  double part(double seconds) const {
    return std::clamp((seconds * unit.per_second - from) / (to - from), 0.0, 1.0);
  }
  double x(double seconds) const { return left + kSide * part(seconds); }
  double y(double seconds) const { return top + kSide * (1 - part(seconds)); }
};

/// The scale from the round number below all times to the one above them.
Scale scale_of(const std::vector<SurveyPoint>& points, double top) {
  double least = points.front().measured_s, most = least;
  for (const SurveyPoint& p : points) {
    least = std::min({least, p.measured_s, p.predicted_s});
    most = std::max({most, p.measured_s, p.predicted_s});
  }
  const trace::TimeUnit unit = trace::time_unit(most);
  least *= unit.per_second;
  most *= unit.per_second;
  const double step = trace::tick_step(std::max(most - least, 0.1 * most), 8);
  return {.left = kMarginLeft,
          .top = top,
          .from = std::max(0.0, std::floor(least / step) * step),
          .to = (std::floor(most / step) + 1) * step,
          .step = step,
          .unit = unit};
}

void draw_axes(Svg& svg, const Scale& scale) {
  constexpr trace::TextStyle kTick{11, trace::kMutedColor, Anchor::kMiddle};
  const double right = scale.left + kSide, bottom = scale.top + kSide;
  const int ticks = static_cast<int>(std::lround((scale.to - scale.from) / scale.step));
  double widest = 0;
  for (int i = 0; i <= ticks; ++i) {
    const double part = kSide * i / ticks;
    const std::string label = trace::tick_label(scale.from + i * scale.step, scale.step);
    const std::string_view color = i == 0 ? trace::kAxisColor : trace::kGridColor;
    svg.line(scale.left, bottom - part, right, bottom - part, color);
    svg.line(scale.left + part, scale.top, scale.left + part, bottom, color);
    svg.text(scale.left - 8, bottom - part + 4, label, {11, trace::kMutedColor, Anchor::kEnd});
    svg.text(scale.left + part, bottom + 16, label, kTick);
    widest = std::max(widest, trace::text_width(label, kTick));
  }
  svg.vertical_text(scale.left - widest - 20, scale.top + kSide / 2,
                    cat("predicted, ", scale.unit.name), {12, trace::kMutedColor});
  svg.text(scale.left + kSide / 2, bottom + 36, cat("measured, ", scale.unit.name),
           {12, trace::kMutedColor, Anchor::kMiddle});
  svg.line(scale.left, bottom, right, scale.top, trace::kMutedColor, 1, true);
  svg.text(right + 6, scale.top + 4, "predicted = measured", {12, trace::kTextColor});
}

std::string tooltip(const SurveyPoint& p) {
  return cat(to_string(p.schedule), ": predicted ", trace::short_time(p.predicted_s), ", measured ",
             trace::short_time(p.measured_s));
}

void draw_points(Svg& svg, const Scale& scale, const std::vector<SurveyPoint>& points) {
  const auto pick = std::ranges::min_element(points, {}, &SurveyPoint::predicted_s);
  const auto best = std::ranges::min_element(points, {}, &SurveyPoint::measured_s);
  const auto dot = [&](const SurveyPoint& p, double radius, trace::Fill fill) {
    svg.circle(scale.x(p.measured_s), scale.y(p.predicted_s), radius, fill, "#ffffff", tooltip(p));
  };
  for (const SurveyPoint& p : points) dot(p, 4, trace::kTimeColor);
  dot(*pick, 8, kPickColor);
  const double x = scale.x(best->measured_s), y = scale.y(best->predicted_s);
  svg.rect(x - 6, y - 6, 12, 12, "#ffffff");
  svg.rect(x - 5, y - 5, 10, 10, kBestColor, tooltip(*best));
}

/// A figure, and below it what it is.
double draw_figure(Svg& svg, double y, const std::string& figure, std::string_view meaning) {
  const double width = trace::kPlotWidth - trace::kMarginRight - kAsideLeft;
  svg.text(kAsideLeft, y + 22, figure, {24, trace::kTextColor, Anchor::kStart, true});
  return trace::draw_lines(svg, kAsideLeft, y + 40, meaning, {12, trace::kMutedColor}, width) + 4;
}

void draw_aside(Svg& svg, double top, const std::vector<SurveyPoint>& points) {
  const Agreement a = agreement_of(points);
  const double width = trace::kPlotWidth - trace::kMarginRight - kAsideLeft;
  double y = draw_figure(svg, top + 20, cat(points.size()), "points: schedules, a dot each");
  y = draw_figure(svg, y, formatted("%.3f", a.rank_correlation),
                  "rank correlation (Spearman's) of predicted and measured times");
  y = draw_figure(svg, y, formatted("%.1f %%", 100 * a.median_error),
                  "median error of a prediction; 90 % of errors are below " +
                      formatted("%.1f %%", 100 * a.p90_error));
  y = draw_figure(svg, y, formatted("%.3f", a.pick),
                  "time of the fastest point over that of the point that the model takes for the "
                  "fastest; 1 is a perfect choice");
  trace::draw_keys(svg, kAsideLeft, y + 16,
                   {{trace::kTimeColor, "a schedule", true},
                    {kPickColor, "predicted fastest", true},
                    {kBestColor, "measured fastest"}},
                   width);
}

}  // namespace

std::string draw_survey(const trace::PageText& page, const std::vector<SurveyPoint>& points) {
  Svg svg;
  const double top = trace::draw_head(svg, page) + 12;
  if (points.empty()) {
    const double end =
        trace::draw_absence(svg, top, "There is nothing to draw: no point was measured.");
    return trace::document(svg, page, trace::draw_foot(svg, page, end + 8));
  }
  const Scale scale = scale_of(points, top);
  draw_axes(svg, scale);
  draw_points(svg, scale, points);
  draw_aside(svg, top, points);
  return trace::document(svg, page, trace::draw_foot(svg, page, top + kSide + 48));
}

}  // namespace uniep::tool
