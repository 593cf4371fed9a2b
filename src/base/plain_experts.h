#pragma once

#include "uniep/problem.h"

namespace uniep {

/// Whether experts are SwiGLU's with probabilities ahead of fc2, no biases and one combine group.
/// These have kernels of their own on GPUs; all others share the general ones, which take a little
/// longer.
constexpr bool are_plain_experts(Activation activation, Probs probs, bool bias, bool grouped) {
  return activation == Activation::kSwiglu && probs == Probs::kBefore && !bias && !grouped;
}
constexpr bool has_plain_experts(const Problem& p) {
  return are_plain_experts(p.activation, p.probs, p.bias, p.combine_groups > 1);
}

}  // namespace uniep
