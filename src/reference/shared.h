#pragma once

#include <utility>
#include <vector>

#include "reference/arithmetic.h"
#include "reference/inputs.h"

namespace uniep::reference {

/// The shared experts as a layer of their own, of S experts, all of which each token goes to.
template <class T>
Inputs<T> shared_layer(const Inputs<T>& in) {
  Inputs<T> shared{.tokens = in.tokens,
                   .hidden = in.hidden,
                   .intermediate = in.intermediate,
                   .num_experts = in.shared_experts,
                   .topk = in.shared_experts,
                   .activation = in.activation,
                   .probs = in.probs,
                   .x = in.x,
                   .topk_ids = {},
                   .topk_probs = in.shared_probs,
                   .w1 = in.shared_w1,
                   .w2 = in.shared_w2,
                   .dy = in.dy};
  for (std::int64_t t = 0; t < in.tokens; ++t) {
    for (int s = 0; s < in.shared_experts; ++s) shared.topk_ids.push_back(s);
  }
  return shared;
}

/// sum = bf16(sum + added): what was added up in each layer has been rounded.
template <class Arithmetic, class T>
void add_rounded(std::vector<T>& sum, const std::vector<T>& added) {
  for (std::size_t i = 0; i < sum.size(); ++i) {
    sum[i] += added[i];
    sum[i] = Arithmetic::stored(sum[i]);
  }
}

/// What the layer of shared experts gives joins the result of the others.
template <class Arithmetic, class T>
void add_shared(Outputs<T>& result, Outputs<T> shared) {
  add_rounded<Arithmetic>(result.out, shared.out);
  add_rounded<Arithmetic>(result.dx, shared.dx);
  result.dshared_probs = std::move(shared.dprobs);
  result.dshared_w1 = std::move(shared.dw1);
  result.dshared_w2 = std::move(shared.dw2);
}

}  // namespace uniep::reference
