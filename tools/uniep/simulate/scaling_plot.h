#pragma once

#include <string>
#include <vector>

#include "trace/page.h"

namespace uniep::tool {

/// Predicted times of a pass over numbers of ranks.
struct ScalingCurve {
  std::string name;
  std::vector<double> seconds;  ///< by number of ranks
  std::vector<double> exposed;  ///< part of these that communication adds
};

/// What `uniep simulate` predicted.
struct ScalingInput {
  trace::PageText page;
  std::vector<int> ranks;
  std::vector<ScalingCurve> curves;
  int gpus_per_node = 0;        ///< ranks above it are several nodes; 0: all are one node
  std::string between_nodes{};  ///< what connects nodes
};

/// One self-contained SVG document: side by side a panel a curve, all on one scale, with the time
/// and its exposed part as a column for each number of ranks, and where nodes begin.
std::string draw_scaling(const ScalingInput& input);

}  // namespace uniep::tool
