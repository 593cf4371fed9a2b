#pragma once

#include "uniep/problem.h"

namespace uniep {

/// Whether experts are SwiGLU's with probabilities ahead of fc2, no biases, and one sum of a
/// token's rows; `grouped`: several, or none. These have kernels of their own on GPUs; all others
/// share the general ones, which take a little longer.
constexpr bool are_plain_experts(Activation activation, Probs probs, bool bias, bool grouped) {
  return activation == Activation::kSwiglu && probs == Probs::kBefore && !bias && !grouped;
}

}  // namespace uniep
