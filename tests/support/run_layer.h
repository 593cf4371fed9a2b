#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "base/layer_data.h"
#include "layer/arguments.h"
#include "layout/page_pool.h"
#include "support/expert_forms.h"
#include "support/guarded_memory.h"
#include "support/ring_rows.h"
#include "support/slot_rows.h"
#include "uniep/layer.h"
#include "workload/split.h"

namespace uniep::testing {

/// Runs plan, forward and backward of a global layer on threads of this process, one rank per part
/// of the tokens, into buffers full of NaNs; with `main_grad` or `bf16_main_grad`, weight gradients
/// are added to `main_grad_start`.
struct RunOptions {
  std::vector<std::int64_t> token_begin;  // [ranks + 1]; see workload::Split
  int hosts = 1;                          // that the ranks are taken to be on
  Schedule forward_schedule;
  Schedule backward_schedule;
  LayerOptions layer;
  int row_align = 128;
  Save save = Save::kRows;
  bool recompute_h = false;
  bool main_grad = false;
  bool bf16_main_grad = false;
  float main_grad_start = 0;
  /// Backward in two parts, weight gradients under a schedule of their own, after a forward pass of
  /// the same tokens that nobody asks about.
  bool defer_weights = false;
  Schedule weights_schedule;
  /// All memory is the caller's, full of garbage at first; what forward leaves is moved before each
  /// part of backward.
  bool callers_memory = false;
  /// ... which has the rows that come, not as many as there is capacity for.
  bool exact_rows = false;
  /// What forward saves is in pages of a row pool, in disorder. Not with `callers_memory`.
  bool row_pool = false;
  /// Backward has room for the rows of the fullest expert at a time, and so many tiles of row_align
  /// rows; -1: for all. Not with `defer_weights`.
  int ring_tiles = -1;
  int gathered_hosts = 1, first_host = -1;  // of Problem; max_tokens has room for what that asks
  /// out and dx are rows of slots, in one combine group, and added up as the layer's would be.
  bool slot_rows = false;
  /// How weights and their gradients lie.
  ExpertForms forms;
};

/// A pool with room for what four plans of a rank may bring.
inline RowPool roomy_pool(const Problem& problem, const Communicator& communicator) {
  const std::int64_t rows = capacity_rows(problem, communicator.size());
  const std::int64_t pages =
      4 *
      (page_shape(problem).pages_of(rows, most_received(problem, communicator.size(), rows)) + 1);
  return RowPool(problem, communicator, {.bytes = PagePoolLayout(problem, pages).bytes});
}

/// Takes pages, so that a plan's are others than its rows' numbers, and in another order.
inline RoutingPlan stir_pages(Layer& layer, std::span<const std::int32_t> topk_ids) {
  (void)layer.plan(topk_ids);  // they go back in reverse
  return layer.plan(topk_ids);
}

/// One rank's part of a run in the caller's memory.
inline void run_in_callers_memory(Layer& layer, const workload::Split& split,
                                  const RunOptions& options, const ForwardArgs& forward,
                                  const BackwardArgs& args) {
  const int rank = layer.communicator().rank();
  const MemoryNeeds needs = Layer::memory_needs(layer.problem(), Backend::kCpu, split.ranks());
  const auto tokens = split.tokens(rank).size();
  GuardedMemory plan_memory(needs.plan);
  const RoutingPlan plan =
      layer.plan(split.topk_ids(rank), {.memory = {.plan = plan_memory.bytes()}});
  std::optional<std::int64_t> rows;
  if (options.exact_rows) rows = plan.padded_rows();
  MemoryNeeds step = Layer::memory_needs(layer.problem(), Backend::kCpu, split.ranks(), rows);
  if (options.exact_rows && options.save == Save::kTokens) {
    step.rows_of_x = std::max<std::int64_t>(plan.received_tokens(), 1);
  }
  GuardedStep kept(step, layer.problem());
  kept.plan = std::move(plan_memory);
  (void)layer.forward(plan, forward,
                      {.schedule = options.forward_schedule, .memory = kept.memory()});
  const auto moved = [&](bool backward_memory) {
    kept.move();
    return layer.restore(backward_memory ? kept.memory() : kept.saved(), tokens);
  };
  Saved saved = moved(false);
  if (!options.defer_weights) {
    return layer.backward(saved, args,
                          {.schedule = options.backward_schedule, .memory = kept.memory()});
  }
  layer.backward_data(saved, data_args(args),
                      {.schedule = options.backward_schedule, .memory = kept.memory()});
  GuardedStep other(needs, layer.problem());
  const RoutingPlan again = layer.plan(split.topk_ids(rank), {.memory = other.memory()});
  (void)layer.forward(again, forward,
                      {.schedule = options.forward_schedule, .memory = other.memory()});
  saved = moved(true);
  layer.backward_weights(saved, weights_args(args), {.schedule = options.weights_schedule});
}

inline LayerResult run_layer(const LayerData& data, const RunOptions& options) {
  const workload::Split split(data, options.token_begin);
  Problem problem = split.problem();
  problem.row_align = options.row_align;
  problem.save = options.save;
  problem.recompute_h = options.recompute_h;
  if (options.ring_tiles >= 0) {
    problem.backward_rows =
        ring_rows(data.topk_ids, data.num_experts, options.row_align, options.ring_tiles,
                  data.shared_experts > 0 ? problem.max_tokens : 0);
  }
  problem.gathered_hosts = options.gathered_hosts;
  problem.first_host = options.first_host;
  problem.max_tokens = round_up<std::int64_t>(problem.max_tokens, options.gathered_hosts);
  LayerResult result = workload::make_result(
      data, {.backward = true, .main_grad = options.main_grad, .ranks = split.ranks()});
  const auto start_main_grad = [&](auto& grads) {
    std::fill(grads.begin(), grads.end(), options.main_grad_start);
  };
  start_main_grad(result.main_dw1);
  start_main_grad(result.main_dw2);
  start_main_grad(result.main_db1);
  start_main_grad(result.main_db2);
  start_main_grad(result.main_dshared_w1);
  start_main_grad(result.main_dshared_w2);
  if (options.bf16_main_grad) {
    for (auto* grads : {&result.dw1, &result.dw2, &result.db1, &result.db2, &result.dshared_w1,
                        &result.dshared_w2}) {
      std::ranges::fill(*grads, to_bf16(options.main_grad_start));
    }
  }
  if (options.slot_rows) problem.slot_rows = true, problem.combine_groups = 1;
  SlotRows rows(data);
  CallersGroupMemory callers(options.callers_memory, problem, split.ranks());

  run_ranks(Communicator::cpu_group(split.ranks(), options.hosts), [&](Communicator& communicator) {
    const int rank = communicator.rank();
    LayerOptions layer_options = options.layer;
    layer_options.memory = callers.of_rank(rank);
    if (options.row_pool) layer_options.row_pool = roomy_pool(problem, communicator);
    Layer layer(problem, communicator, layer_options);
    BackwardArgs args = split.backward_args(rank, result);
    if (options.bf16_main_grad) {
      for (WeightGrad* grad :
           {&args.dw1, &args.dw2, &args.db1, &args.db2, &args.dshared_w1, &args.dshared_w2}) {
        *grad = Bf16MainGrad{std::get<ExpertMatrices<bf16>>(*grad)};
      }
    }
    const BackwardArgs results = args;
    FormedStep formed(options.forms, problem, split.ranks());
    ForwardArgs forward = formed.forward(split.forward_args(rank, result));
    args = formed.backward(args);
    if (options.slot_rows) {
      forward.out = SlotRows::of_rank(rows.out, data, split, rank);
      args.dx = SlotRows::of_rank(rows.dx, data, split, rank);
    }
    if (options.callers_memory) {
      run_in_callers_memory(layer, split, options, forward, args);
      return formed.store(results);
    }
    std::optional<RoutingPlan> held;
    if (options.row_pool) held = stir_pages(layer, split.topk_ids(rank));
    RoutingPlan plan = layer.plan(split.topk_ids(rank));
    Saved saved = layer.forward(plan, forward, options.forward_schedule);
    if (!options.defer_weights) {
      layer.backward(saved, args, options.backward_schedule);
      return formed.store(results);
    }
    layer.backward_data(saved, data_args(args), options.backward_schedule);
    if (options.row_pool) plan = layer.plan(split.topk_ids(rank));  // one serves one pass
    layer.forward(plan, forward, options.forward_schedule);
    layer.backward_weights(saved, weights_args(args), options.weights_schedule);
    formed.store(results);
  });
  if (options.slot_rows) {
    result.out = sums_of(data, rows.out, data.probs == Probs::kAfter);
    result.dx = sums_of(data, rows.dx, false);
  }
  return result;
}

}  // namespace uniep::testing
