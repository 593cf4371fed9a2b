#pragma once

#include <cstdint>
#include <memory>

#include "cuda/layer_group.h"
#include "cuda/stream_order.h"
#include "cuda/told_faults.h"
#include "plan/routing_fault.h"
#include "uniep/routing_plan.h"

namespace uniep::cuda {

/// The routings of a layer that could not be planned, and who was told so. The device reports one
/// fault, some time after the plan was launched; until the host has seen which plans have one, all
/// that were made before are under suspicion.
///
/// Only passes and `synchronize` may throw for it. Passes of a plan that cannot be used do nothing
/// on any rank, so that one that throws instead keeps in step with the others. Ranks hear of a
/// fault at different times: any other call that threw would be missing on one rank alone.
class RoutingFaults {
 public:
  /// `reported`: where the device writes. It and `group` outlive this.
  RoutingFaults(const LayerGroup& group, RoutingFault& reported)
      : group_(group), reported_(reported) {}

  /// The number of the next plan, from 1.
  std::int64_t number_plan(const StreamOrder& calls);

  /// What the layer's plans share, by which they know whose they are.
  const std::shared_ptr<ToldFaults>& told() const { return told_; }

  /// Throws the fault of a plan that is about to be used, if its maker wanted faults as errors.
  /// Whether it has one, is asked of plans that may, of other layers', and where the call `waits`
  /// for the plan anyway.
  void throw_if_unusable(const RoutingPlan& plan, bool waits, const StreamOrder& calls);

  /// Throws the first fault that nobody was told of; not again then. After all calls are done.
  void throw_if_untold(const StreamOrder& calls);

 private:
  void notice(const StreamOrder& calls);
  void forget_told(const StreamOrder& calls);
  void throw_if_any(const RoutingFault& fault) const;

  const LayerGroup& group_;
  RoutingFault& reported_;
  std::int64_t plans_ = 0;     // made so far
  std::int64_t suspects_ = 0;  // the first so many of them may have no rows, and say so
  RoutingFault untold_;        // of one of these
  const std::shared_ptr<ToldFaults> told_ = std::make_shared<ToldFaults>();
};

}  // namespace uniep::cuda
