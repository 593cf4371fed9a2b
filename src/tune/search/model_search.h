#pragma once

#include <functional>
#include <limits>
#include <vector>

#include "schedule/space.h"
#include "tune/book/cache.h"
#include "tune/model/machine_profile.h"

namespace uniep::tune {

/// A point of the space and what the model, or a measurement, says of it.
struct Ranked {
  Schedule schedule;
  double seconds = 0;
};

struct ModelSearchOptions {
  int samples = 200;  ///< random points
  int climbs = 4;     ///< of the best of these are improved axis by axis
  int evaluations = 600;
  /// The time after which no more are begun, whatever is left of `evaluations`.
  double seconds = std::numeric_limits<double>::infinity();
  int simplified =
      24;  ///< of the best are put back to the first seed's values where that is as good
  std::uint64_t seed = 1;
};

/// Evaluates `seeds` and random points, side by side on all cores (`evaluate` is called by several
/// threads at a time), then walks from the best ones to better neighbours until
/// there are none or `evaluations` are spent. All points that were evaluated, fastest first; of
/// those that the model cannot tell apart, the one that is most like the first seed. Deterministic,
/// unless `seconds` end it.
std::vector<Ranked> search_model(const Space& space, const std::vector<Schedule>& seeds,
                                 const std::function<double(const Schedule&)>& evaluate,
                                 const ModelSearchOptions& options);

/// Up to `count` of `ranked`, fastest first, that are worth measuring. The model is off by some
/// percent, so one of several points that are alike (no more than three axes and 1 % apart) stands
/// for all.
std::vector<Ranked> distinct(const std::vector<Ranked>& ranked, std::size_t count);

}  // namespace uniep::tune
