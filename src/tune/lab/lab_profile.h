#pragma once

#include <functional>

#include "tune/lab/measured_profile.h"
#include "tune/lab/profile_lab.h"

namespace uniep::tune {

struct LabOptions {
  int repeats = 5;       ///< of each pass that is looked at
  double busy_s = 0.3;   ///< of products before each: a GPU that rested is faster than one at work
  int busy_passes = 20;  ///< before each pass that is looked at for its link
  std::function<void()> progress = [] {};
};

/// Times layers of several shapes in a lab and fits a profile to what their tasks took. `known`
/// has what is not measured: how workers are organised and, for a lab of one rank, the link.
MeasuredProfile measure_lab_profile(ProfileLab& lab, const MachineProfile& known,
                                    const LabOptions& options);

/// How often that calls `progress`.
int lab_profile_steps(int ranks);

}  // namespace uniep::tune
