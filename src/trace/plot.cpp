#include "trace/plot.h"

#include "trace/panels.h"

namespace uniep::trace {

std::string draw_plot(const PlotInput& input) {
  constexpr double kPanelGap = 24;
  Svg svg;
  double y = draw_head(svg, input.page);
  for (const auto panel : {draw_load_panel, draw_stage_panel, draw_timeline_panel}) {
    y = panel(svg, input, y) + kPanelGap;
  }
  return document(svg, input.page, draw_foot(svg, input.page, y - kPanelGap));
}

}  // namespace uniep::trace
