#pragma once

#include <functional>
#include <vector>

#include "tune/profile_fit.h"
#include "tune/profile_lab.h"

namespace uniep::tune {

/// Bytes per second of transfers under one condition.
struct LinkFigure {
  std::string what;
  double bytes_per_s = 0;
};

struct LabProfile {
  MachineProfile profile;
  std::vector<FitReport> fits;
  std::vector<LinkFigure> link;  ///< empty with one rank: nothing crosses a link
};

struct LabOptions {
  int repeats = 5;       ///< of each pass that is looked at
  int busy_passes = 20;  ///< before each
  std::function<void()> progress = [] {};
};

/// Times layers of several shapes in a lab and fits a profile to what their tasks took. `known`
/// has what is not measured: how workers are organised and, for a lab of one rank, the link.
LabProfile measure_lab_profile(ProfileLab& lab, const MachineProfile& known,
                               const LabOptions& options);

/// How often that calls `progress`.
int lab_profile_steps(int ranks);

}  // namespace uniep::tune
