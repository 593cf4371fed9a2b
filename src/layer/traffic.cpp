#include "layer/traffic.h"

namespace uniep {

void count_traffic(const RoutingPlan& plan, const Schedule& schedule, PassStats& stats) {
  const Traffic t = plan.traffic();
  const auto token_bytes = plan.problem().hidden * static_cast<std::int64_t>(sizeof(bf16));
  const auto scalar_bytes = t.remote_rows * static_cast<std::int64_t>(sizeof(float));
  const bool forward = stats.pass == Pass::kForward;
  const bool dedup = schedule.dispatch_wire == DispatchWire::kDedup;
  stats.pulled_bytes_no_dedup = t.remote_rows * token_bytes + (forward ? scalar_bytes : 0);
  stats.pulled_bytes =
      (dedup ? t.remote_pulls : t.remote_rows) * token_bytes + (forward ? scalar_bytes : 0);
  stats.pushed_bytes = t.remote_rows * token_bytes + (forward ? 0 : scalar_bytes);
}

}  // namespace uniep
