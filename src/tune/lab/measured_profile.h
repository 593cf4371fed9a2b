#pragma once

#include <string>
#include <vector>

#include "tune/model/profile_fit.h"

namespace uniep::tune {

/// Bytes per second of transfers under one condition.
struct LinkFigure {
  std::string what;
  double bytes_per_s = 0;
};

/// A profile, and what it rests on.
struct MeasuredProfile {
  MachineProfile profile;
  std::vector<FitReport> fits;
  std::vector<LinkFigure> link;  ///< where one was measured
};

}  // namespace uniep::tune
