#pragma once

#include <span>
#include <string>
#include <string_view>

#include "uniep/schedule.h"
#include "uniep/stage.h"

namespace uniep {

/// Says whether an axis changes anything in a pass under this schedule.
using Matters = bool (*)(const Schedule&, Pass, Backend);

/// An axis with access to its field.
struct Axis {
  AxisInfo info;
  int (*get)(const Schedule&);
  void (*set)(Schedule&, int);
  Matters matters = nullptr;  // null: always

  const std::vector<int>& candidates(Backend backend) const {
    return backend == Backend::kCuda ? info.cuda_candidates : info.candidates;
  }
  int default_value(Backend backend) const {
    return backend == Backend::kCuda ? info.cuda_default : info.default_value;
  }
  int neutral_value(Backend backend) const {
    return backend == Backend::kCuda ? info.cuda_neutral : info.neutral_value;
  }
};

std::span<const Axis> axes();

/// Every axis at its neutral value.
Schedule neutral_schedule(Backend backend);

/// The value that `text` names; throws Error(kInvalidArgument) where it names none. The range is
/// checked by `set_axis`.
int parse_axis_value(const AxisInfo& axis, std::string_view text);
std::string axis_value_text(const AxisInfo& axis, int value);

/// "tile_m=64,lag=2": the axes in which a schedule differs from another; empty: none.
std::string unlike_axes_text(const Schedule& schedule, const Schedule& other);

}  // namespace uniep
