#pragma once

#include <algorithm>

#include "layer/expert_places.h"
#include "plan/plan_data.h"
#include "uniep/layer.h"

namespace uniep {

// What a routing that cannot be planned becomes where its plan was made with CallOptions::overflow:
// values instead of an error.

/// Whether a plan that is on the CPU has a fault.
inline bool has_fault(const RoutingPlan& plan) {
  return plan.data().fault.kind != RoutingFault::Kind::kNone;
}

inline void fill_of_fault(const ForwardArgs& args) { std::ranges::fill(args.out, kFaultToken); }

inline void fill_of_fault(const BackwardDataArgs& args) {
  std::ranges::fill(args.dx, kFaultToken);
  std::ranges::fill(args.dprobs, 0.0f);
  std::ranges::fill(args.dshared_probs, 0.0f);
}

inline void fill_of_fault(const BackwardWeightsArgs& args) {
  for (const WeightGrad& grad :
       {args.dw1, args.dw2, args.db1, args.db2, args.dshared_w1, args.dshared_w2}) {
    const auto* dw = std::get_if<ExpertMatrices<bf16>>(&grad);
    if (dw == nullptr) continue;
    for_each_tensor(*dw, [](std::span<bf16> tensor) { std::ranges::fill(tensor, bf16{}); });
  }
}

}  // namespace uniep
