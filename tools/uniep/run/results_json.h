#pragma once

#include <string>
#include <vector>

#include "base/layer_data.h"
#include "run/result_check.h"
#include "run/step.h"
#include "run/summary.h"

namespace uniep::tool {

/// Writes the figures of a run in the schema "uniep-run-1", which docs/results.md describes. An
/// empty `checks` means that nothing was checked.
void write_results(const std::string& path, const RunHeader& header, const LayerData& layer,
                   const StepOptions& options, const StepReport& report,
                   const std::vector<TensorCheck>& checks);

}  // namespace uniep::tool
