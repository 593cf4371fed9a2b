#pragma once

#include <vector>

#include "support/random_case.h"
#include "uniep/schedule.h"

namespace uniep::testing {

/// A schedule of each preset; the last, `single`, is the backend's default.
inline std::vector<Schedule> cuda_schedules() {
  std::vector<Schedule> schedules;
  for (const char* preset : {"sequential", "pipelined:2", "two-kernel", "single"}) {
    schedules.push_back(parse_schedule(preset, default_schedule(Backend::kCuda)));
  }
  return schedules;
}

/// A point of the space that the CUDA backend runs.
inline Schedule random_cuda_schedule(Rng& rng, const Problem& problem) {
  Schedule s = random_schedule(rng, problem, 1, Backend::kCuda);
  s.tile_m = 128;
  s.tile_n = chance(rng, 50) ? 128 : 256;
  const bool in_queue = s.launch == LaunchGrouping::kSeparate && chance(rng, 20);
  s.dispatch_workers = in_queue ? 0 : static_cast<int>(pick(rng, 1, chance(rng, 70) ? 20 : 132));
  return s;
}

}  // namespace uniep::testing
