#pragma once

#include <optional>

#include "call.h"
#include "tensors.h"

namespace uniep::ops {

/// shared_w1 [S, width of h, H] and shared_w2 [S, H, I], or their gradients: both or, where there
/// are no shared experts, neither.
struct SharedExperts {
  const std::optional<Tensor>& w1;
  const std::optional<Tensor>& w2;

  void check(const LayerShape& shape, const Tensor& key, ScalarType type = ScalarType::BFloat16,
             const char* name1 = "shared_w1", const char* name2 = "shared_w2") const {
    const bool wanted = shape.shared_experts != 0;
    if (w1.has_value() != wanted || w2.has_value() != wanted) {
      refuse(std::string(name1) + " and " + name2 +
             (wanted ? " are not both given; a layer with shared experts needs both"
                     : " are given to a layer without shared experts; it takes neither"));
    }
    if (!wanted) return;
    require(*w1, name1, type, {shape.shared_experts, shape.h_width, shape.hidden}, key);
    require(*w2, name2, type, {shape.shared_experts, shape.hidden, shape.intermediate}, key);
  }

  /// Sets the shared experts of a forward or backward call.
  template <class Arguments>
  void set(Arguments& arguments) const {
    if (w1) arguments.shared_w1 = w1->const_data_ptr();
    if (w2) arguments.shared_w2 = w2->const_data_ptr();
  }
};

}  // namespace uniep::ops
