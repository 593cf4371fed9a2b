#pragma once

#include <string>
#include <vector>

namespace uniep::tool {

/// Predicted times over numbers of ranks.
struct ScalingCurve {
  std::string name;
  std::vector<double> seconds;  ///< by number of ranks
  std::vector<double> exposed;  ///< part of these that communication adds
};

/// One self-contained SVG document: a panel a curve, time and its exposed part over `ranks`.
std::string draw_scaling(const std::string& title, const std::vector<std::string>& notes,
                         const std::vector<int>& ranks, const std::vector<ScalingCurve>& curves);

}  // namespace uniep::tool
