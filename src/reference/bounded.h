#pragma once

#include <functional>

#include "reference/inputs.h"

namespace uniep::reference {

/// A number of the exact layer, and how far the roundings of the numerics contract may take the
/// computed one from it. A value that `n` independent roundings reach lies off by the root of the
/// sum of their squares, each carried on by the derivative of what follows; so squares are kept,
/// and they add. Each rounding counts as its largest, half a unit in the last place.
struct Bounded {
  double value = 0;
  double square = 0;  ///< of the expected error

  Bounded& operator+=(const Bounded& other);
  friend bool operator==(const Bounded&, const Bounded&) = default;
};

Bounded operator*(const Bounded& a, const Bounded& b);
/// Divides by a number that is exact.
Bounded operator/(const Bounded& a, const Bounded& b);

/// The number as bf16 memory keeps it.
Bounded rounded_to_bf16(const Bounded& v);

/// The layer and all its gradients in float64, with the error of each element. Weight gradients are
/// those of fp32, not rounded to bf16. `expert_done` is called after each expert.
Outputs<Bounded> bounded(const LayerData& layer, bool backward,
                         const std::function<void()>& expert_done = {});

}  // namespace uniep::reference
