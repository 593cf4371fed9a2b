#include "cuda/plan_handle.h"

#include <vector>

#include "base/check.h"
#include "base/cuda/check_cuda.h"
#include "base/cuda/device_scope.h"
#include "cuda/capture.h"

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

PlanStatus CudaPlan::status() const {
  const DeviceScope scope(device_);
  check_cuda(stream_ ? cudaStreamSynchronize(*stream_) : cudaDeviceSynchronize(),
             "wait for the plan");
  PlanStatus status;
  check_cuda(cudaMemcpy(&status, plan_.status, sizeof(status), cudaMemcpyDeviceToHost),
             "ask whether the plan can be used");
  return status;
}

PlanStatus CudaPlan::usable_status(const PlanData& p) const {
  require(!captured_, ErrorCode::kUnsupported,
          "plan was made in a CUDA graph capture, so its rows change with every replay; what "
          "depends on the routing can be asked of plans made outside of captures");
  if (stream_) require_no_capture(*stream_, "what depends on the routing of a plan");
  const PlanStatus made = status();
  require(made.expired == 0, ErrorCode::kPeerFailed,
          "plan was not made, since a rank did not come in time; Layer::synchronize says which");
  if (!p.flagged && made.fault.kind != RoutingFault::Kind::kNone) {
    told_->tell(made.fault);
    throw_if_any(made.fault, p.problem, p.num_ranks());
  }
  return made;
}

PlanCounts CudaPlan::fetch_counts(const PlanData& p) {
  const DeviceScope scope(device_);
  if (!usable_status(p).ok()) return {};
  std::vector<std::int64_t> last, pulls;
  download(last, plan_.segment_begin + p.num_local_experts, 1);
  download(pulls, plan_.num_pulls, 1);
  return {.padded_rows = last[0], .received = pulls[0]};
}

void CudaPlan::fetch(PlanData& p) {
  const DeviceScope scope(device_);
  p.fault = usable_status(p).fault;
  if (p.fault.kind != RoutingFault::Kind::kNone) {
    p.set_no_rows();
    return;
  }
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

const CudaPlan* cuda_plan(const RoutingPlan& plan) {
  return dynamic_cast<const CudaPlan*>(plan.data().remote.get());
}

const DevicePlan& on_device(const RoutingPlan& plan) {
  const CudaPlan* made = cuda_plan(plan);
  require(made != nullptr, ErrorCode::kInvalidArgument,
          "plan was not made by a CUDA layer; what Layer::plan of this layer returned is accepted");
  return made->device();
}

}  // namespace uniep::cuda
