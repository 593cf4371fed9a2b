#pragma once

#include <functional>
#include <vector>

#include "reference/activation.h"
#include "reference/bias.h"
#include "reference/dispatch.h"
#include "reference/fc1.h"
#include "reference/fc2.h"
#include "reference/inputs.h"
#include "reference/plan.h"
#include "reference/reduce.h"
#include "reference/row_factors.h"
#include "reference/shared.h"
#include "reference/wgrad.h"

namespace uniep::reference {

/// The layer without its shared experts, expert after expert, with a call of `expert_done` after
/// each. Weight gradients are returned as summed, not rounded.
template <class Arithmetic, class T = typename Arithmetic::Number>
Outputs<T> run_experts(const Inputs<T>& in, const std::function<void()>& expert_done = {}) {
  const auto plan = expert_rows(in.topk_ids, in.num_experts, in.topk);
  const bool backward = in.backward();
  Matrix<T> y_slots(in.tokens * in.topk, in.hidden);
  Matrix<T> dx_slots(backward ? in.tokens * in.topk : 0, in.hidden);
  Outputs<T> result;
  if (backward) {
    result.dprobs.resize(in.topk_probs.size());
    result.dw1.resize(in.w1.size());
    result.dw2.resize(in.w2.size());
    result.db1.resize(in.b1.size());
    result.db2.resize(in.b2.size());
  }

  for (std::int64_t e = 0; e < in.num_experts; ++e) {
    const std::vector<Row>& rows = plan[static_cast<std::size_t>(e)];
    const auto w1 = expert_weight(in.w1, e, in.w1_rows(), in.hidden);
    const auto w2 = expert_weight(in.w2, e, in.hidden, in.intermediate);
    const auto b1 = expert_bias(in.b1, e, in.w1_rows());
    const auto b2 = expert_bias(in.b2, e, in.hidden);

    const auto x = dispatch(in.x, in.hidden, rows);
    const auto p = row_factors(dispatch_probs(in.topk_probs, rows), in.probs);
    const std::vector<T> ones(rows.size(), T{1});
    const auto h = with_bias<Arithmetic>(fc1<Arithmetic>(x, w1), b1, ones);
    const auto y = fc2<Arithmetic>(activation<Arithmetic>(h, p.forward, in.activation), w2);
    combine(with_bias<Arithmetic>(y, b2, p.of_b2), rows, y_slots);

    if (backward) {
      auto dy = dispatch(in.dy, in.hidden, rows);
      if (in.probs == Probs::kAfter) dy = scaled_rows<Arithmetic>(std::move(dy), p.of_dy);
      const auto da = fc2_dgrad<Arithmetic>(dy, w2);
      const auto a = activation<Arithmetic>(h, p.backward, in.activation);
      const auto dh = activation_dgrad<Arithmetic>(h, p.backward, da, in.activation);
      combine(fc1_dgrad<Arithmetic>(dh, w1), rows, dx_slots);
      auto dp = dprobs<Arithmetic>(h, da, in.activation);
      add_bias_dprobs(dy, b2, dp);
      if (in.probs == Probs::kAfter) divide(dp, p.divisor);
      combine(dp, rows, result.dprobs);
      place_wgrad(wgrad(dy, a), e, result.dw2);
      place_wgrad(wgrad(dh, x), e, result.dw1);
      if (!b2.empty()) {
        place_wgrad(bias_grad(dh, ones), e, result.db1);
        place_wgrad(bias_grad(dy, p.of_db2), e, result.db2);
      }
    }
    if (expert_done) expert_done();
  }

  result.out = in.probs == Probs::kAfter ? reduce_weighted<Arithmetic>(y_slots, in)
                                         : reduce<Arithmetic>(y_slots, in);
  if (backward) result.dx = reduce<Arithmetic>(dx_slots, in);
  return result;
}

/// All of the layer. Weight gradients of shared experts are summed over all tokens.
template <class Arithmetic, class T = typename Arithmetic::Number>
Outputs<T> run_layer(const Inputs<T>& in, const std::function<void()>& expert_done = {}) {
  Outputs<T> result = run_experts<Arithmetic>(in, expert_done);
  if (in.shared_experts > 0) {
    add_shared<Arithmetic>(result, run_experts<Arithmetic>(shared_layer(in), expert_done));
  }
  return result;
}

}  // namespace uniep::reference
