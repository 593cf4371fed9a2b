#pragma once

#include "tune/lab/measured_profile.h"

namespace uniep::tool {

/// Prints what was measured, and how far the fits are from it.
void print_profile(const tune::MeasuredProfile& measured);

}  // namespace uniep::tool
