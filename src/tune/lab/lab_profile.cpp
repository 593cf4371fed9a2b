#include "tune/lab/lab_profile.h"

#include <algorithm>

#include "base/quantile.h"
#include "tune/lab/lab_link.h"
#include "tune/lab/lab_tasks.h"

namespace uniep::tune {
namespace {

/// Tiles that took no longer than the draw of the next may have been done before.
void drop_waits_for_draws(std::vector<TileSample>& tiles, double draw_s) {
  constexpr double kNear = 1.1;
  std::erase_if(tiles, [&](const TileSample& tile) { return tile.seconds <= kNear * draw_s; });
}

/// What tasks cost that are few is known, not measured: the lab's layers have many.
MoveCost in_known_crowd(MoveCost cost, const MoveCost& known) {
  cost.alone = known.alone;
  cost.crowd = known.crowd;
  return cost;
}

}  // namespace

MeasuredProfile measure_lab_profile(ProfileLab& lab, const MachineProfile& known,
                                    const LabOptions& options) {
  MeasuredProfile found;
  found.profile = known;
  MachineProfile& profile = found.profile;
  TaskFigures tasks = measure_tasks(lab, options);
  drop_waits_for_draws(tasks.tiles, known.draw_s);
  const TileCosts tiles = fit_tiles(tasks.tiles, known.k_step, found.fits);
  profile.gemms = tiles.gemms;
  profile.padding = tiles.padding;
  profile.dispatch =
      in_known_crowd(fit_moves("dispatch", tasks.dispatch, found.fits), known.dispatch);
  profile.reduce = in_known_crowd(fit_moves("reduce", tasks.reduce, found.fits), known.reduce);
  profile.enter = fit_moves("enter", tasks.enter, found.fits);
  profile.launch_s = std::max(0.0, median(tasks.gaps));
  profile.workers = tasks.workers;
  if (lab.ranks() > 1) measure_link(lab, options, found);
  return found;
}

int lab_profile_steps(int ranks) { return task_steps() + (ranks > 1 ? link_steps() : 0); }

}  // namespace uniep::tune
