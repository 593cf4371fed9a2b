#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "uniep/schedule.h"
#include "uniep/timeline.h"

namespace uniep::tune {

/// One pass of a whole group under a schedule.
struct Measurement {
  double seconds = 0;          ///< of the slowest rank
  std::int64_t differing = 0;  ///< elements of all ranks with wrong bits
  std::vector<PassStats> by_rank;
};

/// How a search measures: whoever calls it leads the group.
using Measure = std::function<Measurement(const Schedule&)>;

}  // namespace uniep::tune
