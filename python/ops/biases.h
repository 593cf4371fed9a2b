#pragma once

#include <optional>

#include "call.h"
#include "tensors.h"

namespace uniep::ops {

/// b1 [El, width of h] and b2 [El, H], or their gradients: both or, where experts have none,
/// neither.
struct Biases {
  const std::optional<Tensor>& b1;
  const std::optional<Tensor>& b2;

  void check(const LayerShape& shape, const Tensor& key, ScalarType type = ScalarType::BFloat16,
             const char* name1 = "b1", const char* name2 = "b2") const {
    const bool wanted = shape.has_bias != 0;
    if (b1.has_value() != wanted || b2.has_value() != wanted) {
      refuse(std::string(name1) + " and " + name2 +
             (wanted ? " are not both given; a layer with biases needs both"
                     : " are given to a layer without biases; it takes neither"));
    }
    if (!wanted) return;
    require(*b1, name1, type, {shape.local_experts, shape.h_width}, key);
    require(*b2, name2, type, {shape.local_experts, shape.hidden}, key);
  }

  /// Sets the biases of a forward or backward call.
  template <class Arguments>
  void set(Arguments& arguments) const {
    if (b1) arguments.b1 = b1->const_data_ptr();
    if (b2) arguments.b2 = b2->const_data_ptr();
  }
};

}  // namespace uniep::ops
