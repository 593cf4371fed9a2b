#pragma once

#include <string>
#include <vector>

#include "plan/plan_data.h"
#include "uniep/schedule.h"
#include "uniep/timeline.h"

namespace uniep::tune {

/// A pass as one rank saw it.
struct LabPass {
  double elapsed_s = 0;
  double enter_s = 0;  ///< before its first launch
  int workers = 0;
  std::vector<TimelineEvent> events;
};

/// Something whose passes can be timed, task by task: a rank of a group of GPUs, or in tests a
/// machine that is simulated. All ranks call the same in the same order.
class ProfileLab {
 public:
  virtual ~ProfileLab() = default;

  virtual int ranks() const = 0;
  /// Makes the layer of the passes to come, on all ranks together or on each by itself. The shape
  /// is that of workload::parse_shape.
  virtual void set_up(const std::string& shape, bool together) = 0;
  /// The plan of the layer's routing, as this rank has it.
  virtual const PlanData& plan() const = 0;
  /// The last of some passes, which keep the machine at work: `busy_passes` come before it.
  virtual LabPass run(Pass pass, const Schedule& schedule, int busy_passes) = 0;
  /// Every rank's number.
  virtual std::vector<double> gather(double own) = 0;
};

}  // namespace uniep::tune
