#pragma once

#include "uniep/problem.h"

namespace uniep {

/// Whether experts are SwiGLU's with probabilities ahead of fc2, no biases, one combine group and
/// none that are shared. These have kernels of their own on GPUs; all others share the general
/// ones, which take a little longer.
constexpr bool are_plain_experts(Activation activation, Probs probs, bool bias, bool grouped,
                                 bool shared) {
  return activation == Activation::kSwiglu && probs == Probs::kBefore && !bias && !grouped &&
         !shared;
}

}  // namespace uniep
