#include "tune/simulated_rank.h"

namespace uniep::tune {

SimulatedRank::SimulatedRank(const PlanData& plan, Pass pass, const Schedule& schedule,
                             const MachineProfile& profile, int workers)
    : order(plan, pass, schedule),
      counters(view()),
      costs(profile, view(), workers),
      pushed(view()) {
  const PassView& v = view();
  for (int i = 0; i < num_launches(v); ++i) {
    launches.push_back(launch_at(v, i));
    comm.emplace_back(v, launches.back().comm);
    main.emplace_back(v, launches.back().main);
  }
  pushes_left = v.tile_begin[v.num_blocks()] * column_tiles(v, v.second_gemm());
  stats.pass = pass;
  stats.launches = static_cast<int>(launches.size());
}

}  // namespace uniep::tune
