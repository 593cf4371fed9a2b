#pragma once

#include "tune/lab/lab_profile.h"

namespace uniep::tune {

/// Measures what lies between the ranks of a lab: link, flags and how much slower products are
/// beside them, all into the profile.
void measure_link(ProfileLab& lab, const LabOptions& options, MeasuredProfile& found);
int link_steps();

}  // namespace uniep::tune
