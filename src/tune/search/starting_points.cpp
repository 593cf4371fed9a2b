#include "tune/search/starting_points.h"

#include <algorithm>

namespace uniep::tune {

std::vector<Schedule> starting_points(const Space& space, const Problem& problem,
                                      const TuneKey& key, const Place& place,
                                      const MachineProfile* profile) {
  const Schedule base = default_schedule_for(problem, place);
  std::vector<Schedule> points{space.canonical(base)};
  const auto add = [&](const Schedule& schedule) {
    const Schedule s = space.canonical(schedule);
    if (space.allows(s) && std::ranges::find(points, s) == points.end()) points.push_back(s);
  };
  for (const char* preset : {"sequential", "pipelined:2", "pipelined:4", "two-kernel", "single"}) {
    add(parse_schedule(preset, base));
  }
  if (profile != nullptr) add(quick_pick(problem, key, place, *profile));
  return points;
}

}  // namespace uniep::tune
