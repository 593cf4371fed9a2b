#pragma once

#include <cuda_runtime_api.h>

#include "base/expert_numbers.h"
#include "base/token_order.h"
#include "cuda/plan_memory.h"
#include "layout/page_pool.h"

// Launches of the plan and order kernels. They neither allocate nor synchronise, and can be
// captured in a CUDA graph: what changes from plan to plan is counted on the device.

namespace uniep::cuda {

/// The exchange part of every rank's symmetric memory.
struct PlanExchange {
  PlanExchangeLayout layout;
  std::byte* parts[kMaxCudaRanks] = {};  // by rank, as mapped here
};

/// A rank's row pool as kernels see it.
struct PlanPool {
  PageStack stack;
  std::int64_t pages = 0;  // 0: the layer has none
  std::int64_t page_bytes = 0;
  PageShape shape{};
};

/// What the plan kernel is told. `report` is host-visible memory, reset by the host alone.
struct PlanArgs {
  int rank = 0;
  int num_ranks = 1;
  int topk = 1;
  ExpertNumbers experts;
  int row_align = 1;
  TokenOrder order;
  std::int64_t capacity = 0;
  std::int64_t backward_rows = 0;          // Problem::backward_rows
  std::int64_t tokens = 0;                 // of this rank
  const std::int32_t* topk_ids = nullptr;  // of this rank, [tokens, K]
  PlanExchange exchange;
  PlanScratch scratch;
  DevicePlan plan;
  PlanPool pool;
  PlanReport* report = nullptr;
  std::int64_t* overflow = nullptr;  // CallOptions::overflow; then `report` is told of no fault
  std::uint32_t limit_ticks = 0;     // of every wait, in units of 1024 ns
  CallState* calls = nullptr;        // this rank's; null in tests without one
};

PlanArgs plan_args(const Problem& problem, int rank, int num_ranks, std::int64_t tokens,
                   const std::int32_t* topk_ids, const PlanExchange& exchange,
                   const PlanScratch& scratch, const DevicePlan& plan, PlanReport* report,
                   std::int64_t limit_ms);

/// Load the kernels onto this thread's device, as the `prepare` functions of pass_kernels.h do.
cudaError_t prepare_plan();
cudaError_t prepare_order();

/// Exchanges the routing with all ranks, which launch it alike, and fills `args.plan`. At most
/// `ctas` CTAs, resident together.
cudaError_t launch_plan(const PlanArgs& args, int ctas, cudaStream_t stream);

/// Gives the pages that a plan holds back to the pool, if it holds any.
cudaError_t prepare_return_pages();
cudaError_t launch_return_pages(const PageStack& stack, const DevicePlan& plan,
                                cudaStream_t stream);

/// What the order kernel is told: `view` is make_pass_view of the same plan and order.
struct OrderArgs {
  PassView view;
  DevicePlan plan;
  DeviceOrder order;
  PlanScratch scratch;
  const std::uint32_t* failed =
      nullptr;  // DeviceContext::failed: not 0 leaves queues without tasks
};

/// Fills `args.order`. At most `ctas` CTAs, resident together.
cudaError_t launch_order(const OrderArgs& args, int ctas, cudaStream_t stream);

}  // namespace uniep::cuda
