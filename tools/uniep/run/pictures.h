#pragma once

#include <string>

#include "base/layer_data.h"
#include "run/step.h"
#include "run/summary.h"

namespace uniep::tool {

/// The timeline of the last step, for Perfetto.
void write_trace(const std::string& path, const RunHeader& header, const StepOptions& options,
                 const StepReport& report);

/// Load, stages and timeline of the last step in one SVG.
void write_plot(const std::string& path, const RunHeader& header, const LayerData& layer,
                const StepOptions& options, const StepReport& report);

}  // namespace uniep::tool
