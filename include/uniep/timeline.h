#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <vector>

#include "uniep/stage.h"

namespace uniep {

/// One tile task as it ran. Times are nanoseconds of std::chrono::steady_clock since its epoch, so
/// events of all ranks of one process share a time axis.
struct TimelineEvent {
  Pass pass = Pass::kForward;
  Stage stage = Stage::kDispatch;
  std::int32_t worker = 0;
  std::int32_t processor = 0;  ///< what the worker runs on: a thread; an SM, with several workers
  std::int32_t launch = 0;     ///< number of the launch within the pass
  std::int32_t expert = -1;    ///< global expert, E + s of shared expert s; -1 where none applies
  std::int64_t tile = 0;       ///< index within the stage
  std::int64_t begin_ns = 0;   ///< taken from the queue; waits for its inputs begin here
  std::int64_t ready_ns = 0;   ///< all inputs were ready
  std::int64_t link_ns = 0;    ///< within [ready, end]: time spent waiting for the link
  std::int64_t end_ns = 0;     ///< done and signalled
  std::int64_t cycles = 0;     ///< within [ready, end], of an SM's clock; 0: not counted
};

/// Sums over the tasks of one stage on one rank.
struct StageStats {
  std::int64_t tasks = 0;
  double busy_s = 0;  ///< computing and copying, over all workers
  double wait_s = 0;  ///< waiting for inputs
  double link_s = 0;  ///< waiting for the link
};

/// What one rank's last pass did.
struct PassStats {
  Pass pass = Pass::kForward;
  double elapsed_s = 0;  ///< wall time on this rank, from the staging of its tokens to the end
  int workers = 0;
  int launches = 0;                             ///< of the schedule; what stages the tokens is none
  std::array<StageStats, kMaxStages> stages{};  ///< by Stage
  std::int64_t pulled_bytes = 0;                ///< bytes that came over the wire in dispatch
  std::int64_t pulled_bytes_no_dedup = 0;       ///< what one copy a row would have taken
  std::int64_t pushed_bytes = 0;                ///< bytes that went over the wire in combine

  StageStats& operator[](Stage s) { return stages[static_cast<std::size_t>(s)]; }
  const StageStats& operator[](Stage s) const { return stages[static_cast<std::size_t>(s)]; }
};

}  // namespace uniep
