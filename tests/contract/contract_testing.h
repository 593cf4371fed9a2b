#pragma once

#include <string>

#include "base/check.h"
#include "reference/contract.h"
#include "support/gathered_order.h"
#include "support/run_layer.h"
#include "support/shared_layer.h"
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
          .combine_partials = d.combine_partials,
          .shared_experts = d.shared_experts};
}

/// A preset in the name of a test, in which GoogleTest accepts letters, digits and underscores.
inline std::string test_name(std::string preset) {
  for (char& c : preset) c = c == ':' || c == '-' ? '_' : c;
  return preset;
}

/// What weight gradients are added to at first.
struct MainGradStart {
  bool fp32 = false, bf16 = false;
  float value = 0;
};

inline LayerResult contract_of(const LayerData& d, const MainGradStart& start) {
  const auto starts = [](const auto& like, auto value) {
    return std::vector<decltype(value)>(like.size(), value);
  };
  const auto as = [&](auto value, const auto& contract) {
    return contract(d, starts(d.w1, value), starts(d.w2, value), starts(d.b1, value),
                    starts(d.b2, value));
  };
  if (start.fp32) return as(start.value, reference::contract_into_main_grad);
  if (start.bf16) return as(to_bf16(start.value), reference::contract_into_bf16_main_grad);
  return reference::contract(d);
}

/// Weight gradients of shared experts are a part for each rank, summed over its tokens.
inline LayerResult expected(const LayerData& d, const MainGradStart& start,
                            std::vector<std::int64_t> token_begin = {}) {
  LayerResult result = contract_of(d, start);
  result.dshared_w1.clear(), result.dshared_w2.clear();
  if (token_begin.empty()) token_begin = {0, d.tokens};
  for (std::size_t r = 0; d.shared_experts > 0 && r + 1 < token_begin.size(); ++r) {
    const LayerResult part =
        contract_of(shared_layer_of(d, token_begin[r], token_begin[r + 1]), start);
    const auto append = [](auto& to, const auto& from) {
      to.insert(to.end(), from.begin(), from.end());
    };
    append(result.dshared_w1, part.dw1);
    append(result.dshared_w2, part.dw2);
    append(result.main_dshared_w1, part.main_dw1);
    append(result.main_dshared_w2, part.main_dw2);
  }
  return result;
}

inline LayerResult expected(const LayerData& d, bool main_grad, float start) {
  return expected(d, {.fp32 = main_grad, .value = start});
}

/// What `run_layer` gives.
inline LayerResult expected(const LayerData& d, const RunOptions& o) {
  const MainGradStart start{o.main_grad, o.bf16_main_grad, o.main_grad_start};
  LayerResult want = expected(d, start, o.token_begin);
  if (o.gathered_hosts > 1) {
    const LayerData ordered = in_gathered_order(d, o.token_begin, o.gathered_hosts);
    LayerResult in_order = expected(ordered, start, o.token_begin);
    take_weight_grads(in_order, want);
  }
  return want;
}

}  // namespace uniep::testing
