#pragma once

#include <cstdint>
#include <vector>

#include "base/layer_data.h"
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
  int steps = 1;  ///< repeats on the same layer objects; the last one's results are returned
};

inline LayerResult run_layer(const LayerData& data, const RunOptions& options) {
  const workload::Split split(data, options.token_begin);
  Problem problem = split.problem();
  problem.row_align = options.row_align;
  LayerResult result;
  for (int step = 0; step < options.steps; ++step) {
    result = workload::make_result(data, {.backward = true, .main_grad = options.main_grad});
  }
  const auto start_main_grad = [&](auto& grads) {
    std::fill(grads.begin(), grads.end(), options.main_grad_start);
  };
  start_main_grad(result.main_dw1);
  start_main_grad(result.main_dw2);

  run_ranks(Communicator::cpu_group(split.ranks()), [&](Communicator& communicator) {
    const int rank = communicator.rank();
    Layer layer(problem, communicator, options.layer);
    for (int step = 0; step < options.steps; ++step) {
      const RoutingPlan plan = layer.plan(split.topk_ids(rank));
      const Saved saved =
          layer.forward(plan, split.forward_args(rank, result), options.forward_schedule);
      layer.backward(saved, split.backward_args(rank, result), options.backward_schedule);
    }
  });
  return result;
}

}  // namespace uniep::testing
