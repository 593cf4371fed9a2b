// Rows that go back to other hosts are counted in 32 bits: what would pass them is refused.
#include "schedule/returns.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "base/check.h"
#include "plan/plan_data.h"
#include "plan/routing.h"
#include "schedule/pass_order.h"
#include "uniep/routing_plan.h"

namespace uniep {
namespace {

/// On host 1, where the only rank of another host has `tokens`, all for one expert of this host.
void order_forward(std::int64_t tokens, int waves) {
  const Problem p{
      .hidden = 1 << 20, .intermediate = 8, .num_experts = 4, .topk = 1, .max_tokens = tokens};
  const std::vector<std::int64_t> of_ranks{tokens, 0};
  const std::vector<std::int32_t> ids(static_cast<std::size_t>(tokens), 2);
  const Routing routing{.tokens_per_rank = of_ranks, .topk_ids = ids, .hosts = 2};
  const RoutingPlan plan = make_plan(p, 1, routing, check_routing(p, routing));
  Schedule schedule;
  schedule.launch = waves > 1 ? LaunchGrouping::kWaves : LaunchGrouping::kSingle;
  schedule.waves = waves;
  PassOrder(plan.data(), Pass::kForward, schedule);
}

TEST(Returns, RowsBeyondTheCountersRangeAreRefused) {
  EXPECT_NO_THROW(order_forward(2047, 1));
  try {
    order_forward(2048, 1);
    FAIL() << "2^31 elements of one rank were accepted";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::kInvalidArgument);
    EXPECT_NE(std::string(e.what()).find("hidden=1048576"), std::string::npos) << e.what();
  }
}

TEST(Returns, EachWaveHasCountersOfItsOwn) { EXPECT_NO_THROW(order_forward(2048, 2)); }

}  // namespace
}  // namespace uniep
