#include "trace/plot.h"

#include "trace/panels.h"

namespace uniep::trace {
namespace {

/// Breaks a text into lines that fit the picture, at the last comma or space before the edge.
std::vector<std::string> wrapped(std::string_view text, double size) {
  const auto room = static_cast<std::size_t>(kInnerWidth / (0.56 * size));
  std::vector<std::string> lines;
  while (text.size() > room) {
    std::size_t end = text.find_last_of(", ", room - 1);
    end = end == std::string_view::npos ? room : end + 1;
    lines.emplace_back(text.substr(0, end));
    text.remove_prefix(end);
  }
  if (!text.empty()) lines.emplace_back(text);
  return lines;
}

double draw_head(Svg& svg, const PlotInput& input) {
  double y = 32;
  svg.text(kMarginLeft, y, input.title, {19, kTextColor, Anchor::kStart, true});
  y += 4;
  for (const std::string& note : input.notes) {
    for (const std::string& line : wrapped(note, 12)) {
      y += 17;
      svg.text(kMarginLeft, y, line, {12, kMutedColor});
    }
  }
  return y + 18;
}

double draw_foot(Svg& svg, const PlotInput& input, double top) {
  double y = top;
  if (!input.schedule.empty()) {
    for (const std::string& line : wrapped("schedule: " + input.schedule, 11)) {
      y += 15;
      svg.text(kMarginLeft, y, line, {11, kMutedColor});
    }
  }
  return y + 18;
}

}  // namespace

std::string draw_plot(const PlotInput& input) {
  constexpr double kPanelGap = 22;
  Svg svg;
  double y = draw_head(svg, input);
  for (const auto panel : {draw_load_panel, draw_stage_panel, draw_timeline_panel}) {
    const double end = panel(svg, input, y);
    y = end > y ? end + kPanelGap : y;
  }
  y = draw_foot(svg, input, y - kPanelGap);
  return svg.document(kPlotWidth, y, input.title);
}

}  // namespace uniep::trace
