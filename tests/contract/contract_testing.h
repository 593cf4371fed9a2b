#pragma once

#include <string>

#include "base/check.h"
#include "reference/contract.h"
#include "support/run_layer.h"

namespace uniep::testing {

inline Problem problem_of(const LayerData& d) {
  return {.hidden = d.hidden,
          .intermediate = d.intermediate,
          .num_experts = d.num_experts,
          .topk = d.topk,
          .max_tokens = d.tokens};
}

/// Tokens dealt out as evenly as they go.
inline std::vector<std::int64_t> even_parts(std::int64_t tokens, int ranks) {
  std::vector<std::int64_t> begin;
  for (int r = 0; r <= ranks; ++r) begin.push_back(r * tokens / ranks);
  return begin;
}

inline LayerResult expected(const LayerData& d, bool main_grad, float start) {
  if (!main_grad) return reference::contract(d);
  return reference::contract_into_main_grad(d, std::vector<float>(d.w1.size(), start),
                                            std::vector<float>(d.w2.size(), start));
}

}  // namespace uniep::testing
