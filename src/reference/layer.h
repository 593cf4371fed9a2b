#pragma once

#include <functional>
#include <vector>

#include "reference/activation.h"
#include "reference/dispatch.h"
#include "reference/fc1.h"
#include "reference/fc2.h"
#include "reference/inputs.h"
#include "reference/plan.h"
#include "reference/reduce.h"
#include "reference/wgrad.h"

namespace uniep::reference {

/// The layer, expert after expert, with a call of `expert_done` after each. Weight gradients are
/// returned as summed, not rounded.
template <class Arithmetic, class T = typename Arithmetic::Number>
Outputs<T> run_layer(const Inputs<T>& in, const std::function<void()>& expert_done = {}) {
  const auto plan = expert_rows(in.topk_ids, in.num_experts, in.topk);
  const bool backward = in.backward();
  Matrix<T> y_slots(in.tokens * in.topk, in.hidden);
  Matrix<T> dx_slots(backward ? in.tokens * in.topk : 0, in.hidden);
  Outputs<T> result;
  if (backward) {
    result.dprobs.resize(in.topk_probs.size());
    result.dw1.resize(in.w1.size());
    result.dw2.resize(in.w2.size());
  }

  for (std::int64_t e = 0; e < in.num_experts; ++e) {
    const std::vector<Row>& rows = plan[static_cast<std::size_t>(e)];
    const auto w1 = expert_weight(in.w1, e, 2 * in.intermediate, in.hidden);
    const auto w2 = expert_weight(in.w2, e, in.hidden, in.intermediate);

    const auto x = dispatch(in.x, in.hidden, rows);
    const auto p = dispatch_probs(in.topk_probs, rows);
    const auto h = fc1<Arithmetic>(x, w1);
    const auto a = activation<Arithmetic>(h, p);
    combine(fc2<Arithmetic>(a, w2), rows, y_slots);

    if (backward) {
      const auto dy = dispatch(in.dy, in.hidden, rows);
      const auto da = fc2_dgrad<Arithmetic>(dy, w2);
      const auto dh = activation_dgrad<Arithmetic>(h, p, da);
      combine(fc1_dgrad<Arithmetic>(dh, w1), rows, dx_slots);
      combine(dprobs<Arithmetic>(h, da), rows, result.dprobs);
      place_wgrad(wgrad(dy, a), e, result.dw2);
      place_wgrad(wgrad(dh, x), e, result.dw1);
    }
    if (expert_done) expert_done();
  }

  result.out = reduce<Arithmetic>(y_slots, in);
  if (backward) result.dx = reduce<Arithmetic>(dx_slots, in);
  return result;
}

}  // namespace uniep::reference
