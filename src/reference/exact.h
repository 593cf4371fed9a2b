#pragma once

#include <functional>

#include "reference/inputs.h"

namespace uniep::reference {

using ExactResult = Outputs<double>;

/// The layer and all its gradients in float64, rounded to nothing narrower anywhere. Of a layer
/// without dy only `out` is computed. Any routing goes: dropped slots, experts without rows, one
/// expert several times in a token, no tokens. Throws Error(kInvalidArgument).
ExactResult exact(const LayerData& layer);

/// `exact` of numbers that need not fit bf16. The caller vouches for the sizes. Large layers take
/// minutes: `expert_done`, if there is one, is called after each expert.
ExactResult exact(const Inputs<double>& inputs, const std::function<void()>& expert_done = {});

}  // namespace uniep::reference
