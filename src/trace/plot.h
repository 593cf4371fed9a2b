#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "trace/page.h"
#include "uniep/timeline.h"

namespace uniep::trace {

/// What a run's picture shows.
struct PlotInput {
  PageText page;

  int num_ranks = 1;
  /// An element a global expert; rank r owns the r-th of num_ranks equal parts.
  std::vector<std::int64_t> rows_per_expert;
  /// An entry a pass that ran, in order, with an element a rank.
  std::vector<std::vector<PassStats>> passes;
  /// Element r: the events of rank r, of one run of each of these passes.
  std::vector<std::vector<TimelineEvent>> timeline;
};

/// One self-contained SVG document: rows per expert, time per stage, and the timeline.
std::string draw_plot(const PlotInput& input);

}  // namespace uniep::trace
