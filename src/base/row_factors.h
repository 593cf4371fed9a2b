#pragma once

#include "base/math.h"
#include "uniep/problem.h"

namespace uniep {

// How the probability p of a row enters (docs/numerics.md). With Probs::kAfter dispatch multiplies
// the rows of dy by p, and dprobs are divided by p; a row whose p is 0 stays dy, and its da counts
// as 0 but for dprobs.

/// What f(h) and b2 are multiplied by in the forward pass.
constexpr UNIEP_HD float factor_of_a(Probs probs, float p) {
  return probs == Probs::kBefore ? p : 1.0f;
}
/// What a row of dy is multiplied by when it is dispatched, and its dprob divided by, with
/// Probs::kAfter.
constexpr UNIEP_HD float factor_of_dy(float p) { return p == 0 ? 1.0f : p; }
/// What da, f(h) and a row of db2 are multiplied by in the backward pass.
constexpr UNIEP_HD float factor_of_da(Probs probs, float p) {
  if (probs == Probs::kBefore) return p;
  return p == 0 ? 0.0f : 1.0f;
}

}  // namespace uniep
