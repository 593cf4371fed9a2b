#include "cuda/pass_record.h"

#include <utility>

#include "cuda/pass.h"
#include "cuda/plan_handle.h"
#include "layer/traffic.h"

namespace uniep::cuda {
namespace {

/// Tasks of a pass that a timeline has room for, of each CTA and each dispatching warp.
constexpr int kTracedTasks = 2048;

bool is_callers(const RoutingPlan& plan) {
  const CudaPlan* made = cuda_plan(plan);
  return made == nullptr || made->is_callers();
}

}  // namespace

PassRecord::PassRecord(int sms, std::vector<std::int32_t> experts, bool record_timeline)
    : sms_(sms) {
  if (record_timeline) trace_.emplace(sms, kTracedTasks, std::move(experts));
}

void PassRecord::announce(const RoutingPlan& plan, PassPart part, const Schedule& schedule,
                          const StreamOrder& calls) {
  if (!calls.captured()) collect_trace(calls.stream());
  schedule_ = schedule;
  plan_.reset();
  if (!calls.captured() && part != PassPart::kWeights && !is_callers(plan)) plan_ = plan;
}

void PassRecord::start(Pass pass, const StreamOrder& calls) {
  const cudaStream_t stream = calls.stream();
  if (trace_) trace_->start(pass, num_ctas(schedule_, sms_), stream, calls.captured());
  traced_stages_.reset();
  calls.captured() ? clock_.skip(pass) : clock_.start(pass, stream);
}

void PassRecord::collect_trace(cudaStream_t stream) {
  if (!trace_) return;
  const auto events = trace_->take(stream);
  if (events.empty()) return;
  // Events of a replay are not of the last pass that the host saw.
  if (!trace_->in_graphs()) traced_stages_ = stage_sums(events);
  timeline_.insert(timeline_.end(), events.begin(), events.end());
}

std::vector<TimelineEvent> PassRecord::take_timeline(cudaStream_t stream) {
  collect_trace(stream);
  return std::exchange(timeline_, {});
}

PassStats PassRecord::stats() const {
  PassStats stats;
  clock_.read(stats);
  stats.workers = num_ctas(schedule_, sms_);
  // A launch of several stages has one time; the trace, once it was collected, has one a task.
  for (std::size_t i = 0; traced_stages_ && i < stats.stages.size(); ++i) {
    if (traced_stages_->stages[i].tasks > 0) stats.stages[i] = traced_stages_->stages[i];
  }
  if (plan_) count_traffic(*plan_, schedule_, stats);
  return stats;
}

}  // namespace uniep::cuda
