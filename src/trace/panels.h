#pragma once

#include "trace/page.h"
#include "trace/plot.h"

namespace uniep::trace {

/// Up to so many ranks are drawn one by one; of more, what tells about all of them.
inline constexpr std::size_t kRanksInFull = 8;

// Each panel draws itself from `top` downwards and returns where it ends.
double draw_load_panel(Svg& svg, const PlotInput& input, double top);
double draw_stage_panel(Svg& svg, const PlotInput& input, double top);
double draw_timeline_panel(Svg& svg, const PlotInput& input, double top);

}  // namespace uniep::trace
