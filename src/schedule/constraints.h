#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>

#include "uniep/schedule.h"

namespace uniep {

/// Where a schedule is to run.
struct Place {
  Backend backend = Backend::kCpu;
  int max_workers =
      0;  ///< workers that can be resident at once (SMs that a pass may hold); 0: any number
};

/// What a schedule must keep to besides its axes' ranges.
struct Constraint {
  ConstraintInfo info;
  /// The sentence that refuses the schedule, or nothing where it keeps to the rule.
  std::optional<std::string> (*violation)(const Schedule&, const Problem&, const Place&);
};

/// In the order in which they are checked. Those with a backend are its own.
std::span<const Constraint> constraints();

/// Why the backend cannot run a schedule that the problem accepts, or nothing where it can.
std::optional<std::string> backend_reason(const Schedule& schedule, const Place& place);

/// Why the schedule cannot run there at all: `invalid_reason`, then `backend_reason`.
std::optional<std::string> invalid_reason(const Schedule& schedule, const Problem& problem,
                                          const Place& place);

/// The default, with tiles low enough for the alignment of experts' rows where the backend has
/// such: the CPU's have any height, the GPU's one.
Schedule default_schedule_for(const Problem& problem, const Place& place);

/// What a counter may rise by in a pass: they are compared by signed differences of 32 bits.
inline constexpr std::int64_t kMaxCount = std::numeric_limits<std::int32_t>::max();

/// The tiles that the CUDA backend was compiled for.
inline constexpr int kCudaTileM = 128;
inline constexpr int kCudaTileN[] = {128, 256};

}  // namespace uniep
