#include "tune/model/simulated_rank.h"

namespace uniep::tune {

SimulatedRank::SimulatedRank(const PlanData& plan, Pass pass, const Schedule& schedule,
                             const MachineProfile& profile, int workers, PassPart part,
                             const Graph& graph)
    : order(plan, pass, schedule, part, graph),
      in_launch(order.view()),
      counters(view()),
      costs(profile, view(), workers),
      pushed(view()) {
  const PassView& v = view();
  for (int i = 0; i < num_launches(v); ++i) {
    launches.push_back(launch_at(v, i));
    comm.emplace_back(v, launches.back().comm);
    main.emplace_back(v, launches.back().main);
  }
  pushes_left = v.tile_begin[v.num_blocks()] * column_tiles(v, StagePlace::kSecond);
  stats.pass = pass;
  stats.launches = static_cast<int>(launches.size());
}

}  // namespace uniep::tune
