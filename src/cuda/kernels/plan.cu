#include "cuda/device/plan.cuh"
#include "cuda/kernels/resident.h"

namespace uniep::cuda {
namespace {

__global__ void __launch_bounds__(kPlanThreads, 1)
    plan_kernel(const __grid_constant__ PlanArgs args) {
  extern __shared__ std::uint32_t shared[];
  __shared__ PlanCta cta;
  make_plan(args, cta, shared);
}

}  // namespace

PlanArgs plan_args(const Problem& p, int rank, int num_ranks, std::int64_t tokens,
                   const std::int32_t* topk_ids, const PlanExchange& exchange,
                   const PlanScratch& scratch, const DevicePlan& plan, PlanReport* report,
                   std::int64_t limit_ms) {
  return {.rank = rank,
          .num_ranks = num_ranks,
          .topk = p.topk,
          .experts = expert_numbers(p, num_ranks),
          .row_align = p.row_align,
          .order = token_order(p, num_ranks),
          .capacity = capacity_rows(p, num_ranks),
          .backward_rows = p.backward_rows,
          .tokens = tokens,
          .topk_ids = topk_ids,
          .exchange = exchange,
          .scratch = scratch,
          .plan = plan,
          .pool = {},
          .report = report,
          .limit_ticks = static_cast<std::uint32_t>(limit_ms * 1'000'000 / 1024)};
}

/// For any number of experts: a layer with fewer leaves others what they need.
cudaError_t prepare_plan() {
  const std::size_t most = plan_shared_bytes(kMaxExperts, 1);
  const cudaError_t set = cudaFuncSetAttribute(
      plan_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(most));
  return set == cudaSuccess ? load_kernel(plan_kernel) : set;
}

cudaError_t launch_plan(const PlanArgs& args, int ctas, cudaStream_t stream) {
  const std::size_t shared = plan_shared_bytes(args.experts.of_rank(), args.num_ranks);
  return launch_resident(plan_kernel, args, kPlanThreads, shared, ctas, stream);
}

}  // namespace uniep::cuda
