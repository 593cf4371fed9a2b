#pragma once

#include "uniep/layer.h"

namespace uniep {

// The checks at the boundary, the same for every backend. Each throws Error(kInvalidArgument) that
// names the argument, its size and the size that its shape asks for.

void check_topk_ids(const Problem& problem, std::span<const std::int32_t> topk_ids);
void check_forward(const Problem& problem, const Communicator& communicator,
                   const RoutingPlan& plan, const ForwardArgs& args, const Schedule& schedule);
void check_backward_data(const Problem& problem, const Communicator& communicator,
                         const Saved& saved, const BackwardDataArgs& args,
                         const Schedule& schedule);
void check_backward_weights(const Problem& problem, const Communicator& communicator,
                            const Saved& saved, const BackwardWeightsArgs& args,
                            const Schedule& schedule);
void check_backward(const Problem& problem, const Communicator& communicator, const Saved& saved,
                    const BackwardArgs& args, const Schedule& schedule);

/// The parts of a whole backward pass.
inline BackwardDataArgs data_args(const BackwardArgs& a) {
  return {.dy = a.dy, .w1 = a.w1, .w2 = a.w2, .dx = a.dx, .dprobs = a.dprobs};
}
inline BackwardWeightsArgs weights_args(const BackwardArgs& a) {
  return {.dw1 = a.dw1, .dw2 = a.dw2};
}

}  // namespace uniep
