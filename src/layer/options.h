#pragma once

#include "uniep/layer.h"

namespace uniep {

/// Throws Error(kInvalidArgument) where a value is out of its range. Of `schedule` nothing is said
/// here: whether it can run depends on the problem (api/layer_schedules.h).
void validate(const LayerOptions& options);

/// Limit of every wait of the layer in milliseconds: `timeout_ms`, and where that is 0 what the
/// environment says. Where it is out of its range too, so that ranks can agree on its refusal.
int wait_limit_ms(const LayerOptions& options);

}  // namespace uniep
