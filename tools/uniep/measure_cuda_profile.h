#pragma once

#include "bench_device.h"
#include "tune/lab_profile.h"
#include "uniep/communicator.h"

namespace uniep::tool {

/// Measures this rank's GPU and, with more than one, the link between them; collective. A GPU by
/// itself takes the link from the shipped profile of its kind: Error(kUnsupported) where there is
/// none.
tune::MeasuredProfile measure_cuda_profile(const Communicator& group, BenchDevice& device,
                                           const tune::LabOptions& options);

}  // namespace uniep::tool
