#pragma once

#include <string>

#include "base/check.h"
#include "reference/contract.h"
#include "support/run_layer.h"
#include "workload/split.h"

namespace uniep::testing {

inline Problem problem_of(const LayerData& d) {
  return {.hidden = d.hidden,
          .intermediate = d.intermediate,
          .num_experts = d.num_experts,
          .topk = d.topk,
          .max_tokens = d.tokens,
          .activation = d.activation,
          .probs = d.probs,
          .bias = d.has_bias(),
          .combine_groups = d.combine_groups,
          .combine_partials = d.combine_partials};
}

/// A preset in the name of a test, in which GoogleTest accepts letters, digits and underscores.
inline std::string test_name(std::string preset) {
  for (char& c : preset) c = c == ':' || c == '-' ? '_' : c;
  return preset;
}

inline LayerResult expected(const LayerData& d, bool main_grad, float start) {
  if (!main_grad) return reference::contract(d);
  const auto starts = [start](const auto& like) { return std::vector<float>(like.size(), start); };
  return reference::contract_into_main_grad(d, starts(d.w1), starts(d.w2), starts(d.b1),
                                            starts(d.b2));
}

/// What `run_layer` gives.
inline LayerResult expected(const LayerData& d, const RunOptions& o) {
  if (!o.bf16_main_grad) return expected(d, o.main_grad, o.main_grad_start);
  const auto starts = [start = to_bf16(o.main_grad_start)](const auto& like) {
    return std::vector<bf16>(like.size(), start);
  };
  return reference::contract_into_bf16_main_grad(d, starts(d.w1), starts(d.w2), starts(d.b1),
                                                 starts(d.b2));
}

}  // namespace uniep::testing
