#include "cuda/routing_faults.h"

#include <utility>

#include "base/cuda/check_cuda.h"
#include "cuda/plan_handle.h"
#include "plan/plan_data.h"

namespace uniep::cuda {

/// Takes the first fault since the last one from where the device reports it. Any plan made so far
/// may have it, and others may have faults that found the place taken.
void RoutingFaults::notice(const StreamOrder& calls) {
  using Kind = RoutingFault::Kind;
  if (*static_cast<const volatile Kind*>(&reported_.kind) == Kind::kNone) return;
  calls.synchronize();  // all of it is written then
  if (untold_.kind == Kind::kNone) untold_ = reported_;
  reported_ = {};
  suspects_ = plans_;
}

/// What an accessor has thrown, it has waited for: it was reported, unless the place was taken.
void RoutingFaults::forget_told(const StreamOrder& calls) {
  const RoutingFault told = told_->take();
  if (told.kind == RoutingFault::Kind::kNone) return;
  notice(calls);
  if (told == untold_) untold_ = {};
}

std::int64_t RoutingFaults::number_plan(const StreamOrder& calls) {
  if (!calls.captured()) forget_told(calls);
  return ++plans_;
}

void RoutingFaults::throw_if_unusable(const RoutingPlan& plan, bool waits,
                                      const StreamOrder& calls) {
  if (plan.data().flagged) return;
  notice(calls);
  const CudaPlan* made = cuda_plan(plan);
  if (made == nullptr) return;
  if (!waits && made->told_faults() == told_ && made->number() > suspects_) return;
  // The call's stream also has what moved the plan, if it was moved.
  check_cuda(cudaStreamSynchronize(calls.stream()), "wait for a plan");
  const RoutingFault fault = made->status().fault;
  notice(calls);
  if (fault == untold_) untold_ = {};
  throw_if_any(fault);
}

void RoutingFaults::throw_if_untold(const StreamOrder& calls) {
  forget_told(calls);
  notice(calls);
  throw_if_any(std::exchange(untold_, {}));
}

void RoutingFaults::throw_if_any(const RoutingFault& fault) const {
  uniep::throw_if_any(fault, group_.problem(), group_.size());
}

}  // namespace uniep::cuda
