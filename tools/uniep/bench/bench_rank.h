#pragma once

#include <optional>
#include <vector>

#include "bench/bench_case.h"
#include "bench/bench_device.h"
#include "bench/bench_figures.h"
#include "tune/book/auto_schedule.h"
#include "uniep/communicator.h"

namespace uniep::tool {

/// What was measured of one shape, on all ranks.
struct BenchReport {
  std::optional<Floors> floors;
  /// [schedule][direction], as far as it was not interrupted.
  std::vector<std::vector<BenchPass>> schedules;
  std::vector<tune::LayerSchedules> used;  ///< [schedule]
  bool interrupted = false;
};

/// Collective: makes this rank's part of a layer, measures it under every schedule and checks what
/// came out. Ends before a pass where an Interrupt was requested on rank 0. The report is the same
/// on all ranks.
BenchReport run_bench(const BenchCase& bench, const BenchOptions& options,
                      const Communicator& member, BenchDevice& device);

}  // namespace uniep::tool
