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

void RoutingFaults::throw_if_unusable(const RoutingPlan& plan, const StreamOrder& calls) {
  if (plan.data().flagged) return;
  notice(calls);
  const CudaPlan* made = cuda_plan(plan);
  if (made == nullptr || made->number() > suspects_) return;
  // Where it was moved, too.
  check_cuda(cudaStreamSynchronize(calls.stream()), "wait for a plan");
  const RoutingFault fault = made->status().fault;
  if (fault == untold_) untold_ = {};
  throw_if_any(fault);
}

void RoutingFaults::throw_if_untold(const StreamOrder& calls) {
  notice(calls);
  throw_if_any(std::exchange(untold_, {}));
}

void RoutingFaults::throw_if_any(const RoutingFault& fault) const {
  uniep::throw_if_any(fault, group_.problem(), group_.size());
}

}  // namespace uniep::cuda
