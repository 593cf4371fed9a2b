#pragma once

#include <vector>

#include "support/random_case.h"
#include "uniep/schedule.h"

namespace uniep::testing {

/// A schedule of each preset, with tiles that the CUDA backend has.
inline std::vector<Schedule> cuda_schedules() {
  std::vector<Schedule> schedules;
  for (const char* preset : {"sequential", "pipelined:2", "two-kernel", "single"}) {
    schedules.push_back(
        parse_schedule(std::string(preset) + ",tile_m=128,tile_n=256,dispatch_workers=16"));
  }
  return schedules;
}

/// A point of the space that the CUDA backend runs.
inline Schedule random_cuda_schedule(Rng& rng, const Problem& problem) {
  Schedule s = random_schedule(rng, problem, 1);
  s.tile_m = 128;
  s.tile_n = chance(rng, 50) ? 128 : 256;
  s.dispatch_workers = static_cast<int>(pick(rng, 1, 20));
  return s;
}

}  // namespace uniep::testing
