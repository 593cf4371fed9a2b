#pragma once

#include "uniep/layer.h"

namespace uniep {

// The checks at the boundary, the same for every backend. Each throws Error(kInvalidArgument) that
// names the argument, its size and the size that its shape asks for.

void check_topk_ids(const Problem& problem, std::span<const std::int32_t> topk_ids);
void check_forward(const Problem& problem, const Communicator& communicator,
                   const RoutingPlan& plan, const ForwardArgs& args, const Schedule& schedule);
void check_backward(const Problem& problem, const Communicator& communicator, const Saved& saved,
                    const BackwardArgs& args, const Schedule& schedule);

}  // namespace uniep
