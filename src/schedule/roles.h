#pragma once

#include "schedule/launches.h"

namespace uniep {

/// What the workers of a launch do.
struct Roles {
  int dispatchers = 0;  ///< workers, the first ones, that begin with the communication queue
  bool join = true;     ///< they take the main queue when that is empty
};

/// Where a launch has both queues, `dispatch_workers` begin with communication; where it has that
/// alone, all do.
inline UNIEP_HD Roles launch_roles(const Schedule& s, const Launch& launch, int workers) {
  if (launch.comm.count == 0) return {0, true};
  const int dispatchers = launch.main.count > 0 ? min_of(s.dispatch_workers, workers) : workers;
  return {dispatchers, s.dispatch_join || dispatchers == workers};
}

/// Workers of a rank of the CPU backend. Dispatch workers mostly wait, so they come on top of one
/// computing worker a core.
inline int cpu_workers(const Schedule& s, int cores, int ranks) {
  return s.workers > 0 ? s.workers : max_of(1, cores / ranks) + s.dispatch_workers;
}

}  // namespace uniep
