#pragma once

#include <functional>
#include <span>

#include "tune/lab/measured_profile.h"

namespace uniep::tool {

/// Measures the CPU backend on this machine: runs layers of several shapes on one rank with every
/// tile shape, and fits what tasks of each stage cost. `effort` 1 takes some ten seconds.
/// `progress` is called after each of `profile_steps()` parts.
tune::MeasuredProfile measure_cpu_profile(double effort, const std::function<void()>& progress);
int profile_steps();
/// The layers that it runs, as `--shape` reads them.
std::span<const char* const> profile_shapes();

/// The profile with the link that UNIEP_CPU_LINK_GBPS emulates now, or none.
tune::MachineProfile with_emulated_link(tune::MachineProfile profile);

}  // namespace uniep::tool
