#include "reference/bounded.h"

#include <gtest/gtest.h>

#include <cmath>

#include "reference/random_layer.h"
#include "support/activations.h"

namespace uniep::reference {
namespace {

/// The error that is expected of a tensor, by its size.
double relative_error(const std::vector<Bounded>& tensor) {
  double squares = 0, errors = 0;
  for (const Bounded& v : tensor) {
    squares += v.value * v.value;
    errors += v.square;
  }
  return std::sqrt(errors / squares);
}

/// Every activation is smooth at 0, or a multiple of its argument: small layers are computed as
/// exactly as others, but for derivatives that have a step there.
TEST(Bounded, SmallTokensAreAllowedNoLargerErrors) {
  for (const Activation activation : testing::kActivations) {
    if (activation == Activation::kReglu) continue;
    RandomLayer spec{.activation = activation};
    const double usual = relative_error(bounded(make_layer(spec), true).out);
    LayerData small = make_layer(spec);
    for (bf16& v : small.x) v = to_bf16(to_float(v) * 1e-9f);
    const Outputs<Bounded> results = bounded(small, true);
    EXPECT_LT(relative_error(results.out), 4 * usual) << name(activation);
    EXPECT_LT(relative_error(results.dprobs), 4 * usual) << name(activation);
  }
}

}  // namespace
}  // namespace uniep::reference
