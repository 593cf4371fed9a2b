#include "layer/traffic.h"

#include "schedule/pass_stages.h"

namespace uniep {

void count_traffic(const RoutingPlan& plan, const Schedule& schedule, PassStats& stats) {
  const Traffic t = plan.traffic();
  const WireBytes wire = wire_bytes(plan.problem(), stats.pass);
  const bool dedup = schedule.dispatch_wire == DispatchWire::kDedup;
  const std::int64_t with_rows = t.remote_rows * wire.pulled_row;
  stats.pulled_bytes_no_dedup = t.remote_rows * wire.pulled_token + with_rows;
  stats.pulled_bytes = (dedup ? t.remote_pulls : t.remote_rows) * wire.pulled_token + with_rows;
  stats.pushed_bytes =
      t.remote_rows * (plan.problem().hidden * wire.pushed_element + wire.pushed_row);
}

}  // namespace uniep
