#pragma once

#include <vector>

#include "schedule/space.h"
#include "tune/book/model_pick.h"

namespace uniep::tune {

/// What a search begins with, as far as the space has it: the default first, the presets, and with
/// a profile the model's quick pick, which is what `auto` takes where nothing is stored: what a
/// search stores must not be slower.
std::vector<Schedule> starting_points(const Space& space, const Problem& problem,
                                      const TuneKey& key, const Place& place,
                                      const MachineProfile* profile);

}  // namespace uniep::tune
