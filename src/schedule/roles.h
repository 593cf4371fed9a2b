#pragma once

#include "schedule/launches.h"

namespace uniep {

/// What the workers of a launch do.
struct Roles {
  int dispatchers = 0;  ///< workers, the first ones, that begin with the communication queue
  bool join = true;     ///< they take the main queue when that is empty
};

/// Roles under an even routing. Where a launch has both queues, `dispatch_workers` begin with
/// communication; where it has that alone, all do.
inline UNIEP_HD Roles even_roles(const PassView& v, const Launch& launch, int workers) {
  if (launch.comm.count == 0) return {0, true};
  const Schedule& s = v.schedule;
  // In a ring of rows dispatch waits for tiles.
  const int most = workers - (v.ring_rows > 0 ? 1 : 0);
  const int dispatchers = launch.main.count > 0 ? min_of(s.dispatch_workers, most) : workers;
  return {dispatchers, s.dispatch_join || dispatchers == workers};
}

/// Tiles of this rank's rows over those that an even routing of as many tokens a rank as it has
/// itself would bring, to the nearest whole number, at least 1.
inline UNIEP_HD int load_factor(const PassView& v) {
  const std::int64_t experts = v.num_local_experts;
  const std::int64_t rows = max_of<std::int64_t>(v.tokens * v.slots, 1);
  const std::int64_t even =
      experts * ceil_div(ceil_div(rows, experts), std::int64_t{v.schedule.tile_m});
  const std::int64_t tiles = v.tile_begin[v.num_blocks()];
  return static_cast<int>(max_of<std::int64_t>((2 * tiles + even) / (2 * even), 1));
}

/// The same roles on a rank with more rows: a pull costs a dispatcher as many stores as the token
/// has rows here, so as many more dispatchers are wanted as there are more rows. Up to half of the
/// workers: the rest begin with tiles.
inline UNIEP_HD Roles roles_under_load(const PassView& v, Roles even, int workers) {
  if (even.dispatchers == 0 || even.dispatchers >= workers / 2) return even;
  const std::int64_t wanted = std::int64_t{even.dispatchers} * load_factor(v);
  return {static_cast<int>(min_of<std::int64_t>(wanted, workers / 2)), even.join};
}

inline UNIEP_HD Roles launch_roles(const PassView& v, const Launch& launch, int workers) {
  return roles_under_load(v, even_roles(v, launch, workers), workers);
}

/// Workers of a rank of the CPU backend. Dispatch workers mostly wait, so they come on top of one
/// computing worker a core.
inline int cpu_workers(const Schedule& s, int cores, int ranks) {
  return s.workers > 0 ? s.workers : max_of(1, cores / ranks) + s.dispatch_workers;
}

}  // namespace uniep
