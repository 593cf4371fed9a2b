#pragma once

#include <span>
#include <string>
#include <string_view>

#include "uniep/schedule.h"

namespace uniep {

/// An axis with access to its field.
struct Axis {
  AxisInfo info;
  int (*get)(const Schedule&);
  void (*set)(Schedule&, int);
};

std::span<const Axis> axes();

/// The value that `text` names; throws Error(kInvalidArgument) where it names none. The range is
/// checked by `set_axis`.
int parse_axis_value(const AxisInfo& axis, std::string_view text);
std::string axis_value_text(const AxisInfo& axis, int value);

}  // namespace uniep
