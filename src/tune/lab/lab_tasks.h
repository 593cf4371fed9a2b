#pragma once

#include "tune/lab/lab_profile.h"

namespace uniep::tune {

/// What tasks and launches took on a rank by itself.
struct TaskFigures {
  std::vector<TileSample> tiles;
  std::vector<Observation> dispatch, reduce, enter;  ///< in move_terms
  std::vector<double> gaps;                          ///< between launches
  int workers = 0;
};

/// Layers of several shapes, each rank by itself and stage by stage, so that no task waits for
/// another.
TaskFigures measure_tasks(ProfileLab& lab, const LabOptions& options);
int task_steps();

}  // namespace uniep::tune
