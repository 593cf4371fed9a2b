#pragma once

#include <optional>

#include "bench/bench_device.h"
#include "tune/lab/lab_profile.h"
#include "uniep/communicator.h"

namespace uniep::tool {

/// Measures this rank's GPU and, with more than one, the link between them; collective. What is not
/// measured, the link of a GPU by itself among it, is taken from `like`, or else from the shipped
/// profile of its kind: Error(kUnsupported) where a GPU by itself has neither.
tune::MeasuredProfile measure_cuda_profile(const Communicator& group, BenchDevice& device,
                                           const tune::LabOptions& options,
                                           const std::optional<tune::MachineProfile>& like = {});

}  // namespace uniep::tool
