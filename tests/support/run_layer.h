#pragma once

#include <cstdint>
#include <vector>

#include "base/layer_data.h"
#include "layer/arguments.h"
#include "uniep/layer.h"
#include "workload/split.h"

namespace uniep::testing {

/// Runs plan, forward and backward of a global layer on threads of this process, one rank per part
/// of the tokens, into buffers full of NaNs; with `main_grad`, weight gradients are added to
/// `main_grad_start`.
struct RunOptions {
  std::vector<std::int64_t> token_begin;  // [ranks + 1]; see workload::Split
  Schedule forward_schedule;
  Schedule backward_schedule;
  LayerOptions layer;
  int row_align = 128;
  bool main_grad = false;
  float main_grad_start = 0;
  /// Backward in two parts, weight gradients under a schedule of their own, after a forward pass of
  /// the same tokens that nobody asks about.
  bool defer_weights = false;
  Schedule weights_schedule;
};

inline LayerResult run_layer(const LayerData& data, const RunOptions& options) {
  const workload::Split split(data, options.token_begin);
  Problem problem = split.problem();
  problem.row_align = options.row_align;
  LayerResult result =
      workload::make_result(data, {.backward = true, .main_grad = options.main_grad});
  const auto start_main_grad = [&](auto& grads) {
    std::fill(grads.begin(), grads.end(), options.main_grad_start);
  };
  start_main_grad(result.main_dw1);
  start_main_grad(result.main_dw2);

  run_ranks(Communicator::cpu_group(split.ranks()), [&](Communicator& communicator) {
    const int rank = communicator.rank();
    Layer layer(problem, communicator, options.layer);
    const RoutingPlan plan = layer.plan(split.topk_ids(rank));
    const ForwardArgs forward = split.forward_args(rank, result);
    const BackwardArgs args = split.backward_args(rank, result);
    Saved saved = layer.forward(plan, forward, options.forward_schedule);
    if (!options.defer_weights) {
      layer.backward(saved, args, options.backward_schedule);
      return;
    }
    layer.backward_data(saved, data_args(args), options.backward_schedule);
    layer.forward(plan, forward, options.forward_schedule);
    layer.backward_weights(saved, weights_args(args), options.weights_schedule);
  });
  return result;
}

}  // namespace uniep::testing
