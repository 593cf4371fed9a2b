#include "cuda/cuda_plan.h"

#include <vector>

#include "base/check.h"
#include "cuda/check.h"

namespace uniep::cuda {
namespace {

template <class T>
void download(std::vector<T>& to, const T* from, std::int64_t count) {
  to.resize(static_cast<std::size_t>(count));
  if (count == 0) return;
  check_cuda(cudaMemcpy(to.data(), from, to.size() * sizeof(T), cudaMemcpyDeviceToHost),
             "copy the plan to the host");
}

}  // namespace

void CudaPlan::fetch(PlanData& p) {
  require(!captured_, ErrorCode::kUnsupported,
          "plan was made in a CUDA graph capture, so its rows change with every replay; what "
          "depends on the routing can be asked of plans made outside of captures");
  check_cuda(cudaStreamSynchronize(stream_), "wait for the plan");
  const std::int64_t own_tokens = p.tokens();
  download(p.tokens_per_rank, plan_.tokens_per_rank, p.num_ranks());
  download(p.tokens_per_expert, plan_.tokens_per_expert, p.num_local_experts);
  download(p.segment_begin, plan_.segment_begin, p.num_local_experts + 1);
  download(p.topk_ids, plan_.topk_ids, own_tokens * p.problem.topk);
  download(p.row_origin, plan_.row_origin, p.segment_begin.back());
  std::vector<std::int64_t> num_pulls;
  download(num_pulls, plan_.num_pulls, 1);
  download(p.pulls, plan_.pulls, num_pulls[0]);
  for (const Pull& pull : p.pulls) {
    const bool remote = pull.source != p.rank;
    p.traffic.rows += pull.num_rows;
    p.traffic.remote_rows += remote ? pull.num_rows : 0;
    p.traffic.remote_pulls += remote ? 1 : 0;
  }
  download(p.pull_rows, plan_.pull_rows, p.traffic.rows);
}

const DevicePlan& on_device(const RoutingPlan& plan) {
  const auto* remote = dynamic_cast<const CudaPlan*>(plan.data().remote.get());
  require(remote != nullptr, ErrorCode::kInvalidArgument,
          "plan was not made by a CUDA layer; what Layer::plan of this layer returned is accepted");
  return remote->device();
}

}  // namespace uniep::cuda
