#pragma once

#include "base/layer_data.h"
#include "run/step.h"
#include "uniep/communicator.h"

namespace uniep::tool {

/// `run_steps` for this process' rank on its GPU, together with the processes of the other ranks;
/// the report is the same on all of them. Times are those of the launches on the device; that of
/// the plan includes its launch.
StepReport run_cuda_steps(const LayerData& layer, const StepOptions& options,
                          const Communicator& communicator);

}  // namespace uniep::tool
