#pragma once

#include <optional>
#include <vector>

#include "bench_case.h"
#include "bench_device.h"
#include "bench_figures.h"
#include "tune/auto_schedule.h"
#include "uniep/communicator.h"

namespace uniep::tool {

/// What was measured of one shape, on all ranks.
struct BenchReport {
  std::optional<Floors> floors;
  std::vector<std::vector<BenchPass>> schedules;  ///< [schedule][direction]
  std::vector<tune::LayerSchedules> used;         ///< [schedule]
};

/// Collective: makes this rank's part of a layer, measures it under every schedule and checks what
/// came out. The report is the same on all ranks.
BenchReport run_bench(const BenchCase& bench, const BenchOptions& options,
                      const Communicator& member, BenchDevice& device);

}  // namespace uniep::tool
