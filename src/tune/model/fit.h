#pragma once

#include <vector>

namespace uniep::tune {

/// One observation: sizes, and the time that they took together.
struct Observation {
  std::vector<double> sizes;
  double seconds = 0;
};

/// Coefficients, none below 0, with which the sums of sizes come closest to the times, by the
/// squares of relative errors.
std::vector<double> fit_costs(const std::vector<Observation>& observations);

}  // namespace uniep::tune
