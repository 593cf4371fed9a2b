#pragma once

#include <optional>
#include <span>

#include "layer/saved_data.h"
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
/// `memory`: of the call.
void check_backward_weights(const Problem& problem, const Communicator& communicator,
                            const Saved& saved, const BackwardWeightsArgs& args,
                            const Schedule& schedule, const StepMemory& memory);
void check_backward(const Problem& problem, const Communicator& communicator, const Saved& saved,
                    const BackwardArgs& args, const Schedule& schedule);

/// `waves`: how many a pass has; 0: its tokens come in none, or there are no events of streams.
void check_wave_events(const WaveEvents& events, int waves);

/// The parts of a whole backward pass.
inline BackwardDataArgs data_args(const BackwardArgs& a) {
  return {.dy = a.dy,
          .w1 = a.w1,
          .w2 = a.w2,
          .dx = a.dx,
          .dprobs = a.dprobs,
          .x = a.x,
          .b1 = a.b1,
          .b2 = a.b2,
          .shared_w1 = a.shared_w1,
          .shared_w2 = a.shared_w2,
          .dshared_probs = a.dshared_probs};
}
inline BackwardWeightsArgs weights_args(const BackwardArgs& a) {
  return {.dw1 = a.dw1,
          .dw2 = a.dw2,
          .db1 = a.db1,
          .db2 = a.db2,
          .dshared_w1 = a.dshared_w1,
          .dshared_w2 = a.dshared_w2,
          .dy = a.dy,
          .x = a.x};
}

// Which tensors of the graph arguments are. Weights, which may be several tensors, and weight
// gradients, which may have several types too, are each backend's own business.

/// Null where it is not given: an empty span may lie anywhere.
template <class T>
T* data_if_given(std::span<T> tensor) {
  return tensor.empty() ? nullptr : tensor.data();
}

inline void set_tensors(TensorTable& table, const ForwardArgs& a) {
  table.set(Tensor::kX, a.x.data());
  table.set(Tensor::kTopkProbs, a.topk_probs.data());
  table.set(Tensor::kOut, a.out.data());
  table.set(Tensor::kB1, a.b1.data());
  table.set(Tensor::kB2, a.b2.data());
  table.set(Tensor::kSharedW1, a.shared_w1.data());
  table.set(Tensor::kSharedW2, a.shared_w2.data());
  table.set(Tensor::kSharedProbs, data_if_given(a.shared_probs));
}
inline void set_tensors(TensorTable& table, const BackwardDataArgs& a) {
  table.set(Tensor::kDy, a.dy.data());
  table.set(Tensor::kDx, a.dx.data());
  table.set(Tensor::kDprobs, a.dprobs.data());
  table.set(Tensor::kX, a.x.data());
  table.set(Tensor::kB1, a.b1.data());
  table.set(Tensor::kB2, a.b2.data());
  table.set(Tensor::kSharedW1, a.shared_w1.data());
  table.set(Tensor::kSharedW2, a.shared_w2.data());
  table.set(Tensor::kDsharedProbs, data_if_given(a.dshared_probs));
}
inline void set_tensors(TensorTable& table, const BackwardWeightsArgs& a) {
  table.set(Tensor::kDy, a.dy.data());
  table.set(Tensor::kX, a.x.data());
}

}  // namespace uniep
