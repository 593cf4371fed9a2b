#pragma once

#include <vector>

#include "cuda/pass.h"
#include "uniep/schedule.h"

namespace uniep::testing {

/// A schedule of each preset that the CUDA backend can run, with tiles that it has.
inline std::vector<Schedule> cuda_schedules() {
  std::vector<Schedule> schedules;
  for (const char* preset : {"sequential", "pipelined:2", "two-kernel", "single"}) {
    Schedule s = parse_schedule(preset);
    s.tile_m = 128;
    s.tile_n = 256;
    if (!cuda::unsupported_reason(s)) schedules.push_back(s);
  }
  return schedules;
}

}  // namespace uniep::testing
