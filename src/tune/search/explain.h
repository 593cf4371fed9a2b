#pragma once

#include <array>
#include <string>
#include <vector>

#include "uniep/timeline.h"

namespace uniep::tune {

/// Where the time of a pass went, in seconds of a worker on average over ranks: these parts add up
/// to the elapsed time.
struct Breakdown {
  std::array<double, kMaxStages> busy{};
  double wait = 0;  ///< for inputs
  double link = 0;
  double rest = 0;  ///< without a task: launches, and the end of queues
};

/// The breakdown of one pass on all ranks.
Breakdown breakdown_of(const std::vector<PassStats>& by_rank);

/// Part by part, the median over several passes.
Breakdown median_of(const std::vector<Breakdown>& passes);

/// What makes `a` faster or slower than `base`: "0.42 ms less waiting for inputs, 0.10 ms less in
/// fc2; 0.05 ms more in reduce". Only what is above a fiftieth of the larger total.
std::string explain(const Breakdown& a, const Breakdown& base);

}  // namespace uniep::tune
