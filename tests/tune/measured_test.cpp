// The shipped profile against what was measured on 4 H200: the figures that docs/tuning.md quotes.
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "tune/cost_model.h"
#include "workload/synthetic.h"

namespace uniep::tune {
namespace {

constexpr int kRanks = 4;

/// The plans of a shape with random balanced routing, made once.
const std::vector<RoutingPlan>& plans_of(const std::string& shape) {
  static std::map<std::string, std::vector<RoutingPlan>> made;
  auto& plans = made[shape];
  if (!plans.empty()) return plans;
  const workload::ShapeSpec spec = workload::parse_shape(shape);
  const workload::Routing routing = workload::make_routing(spec, kRanks, 0, 0);
  const Problem problem{.hidden = spec.hidden,
                        .intermediate = spec.intermediate,
                        .num_experts = spec.num_experts,
                        .topk = spec.topk,
                        .max_tokens = spec.tokens};
  const std::vector<std::int64_t> tokens(kRanks, spec.tokens);
  plans = plans_to_simulate(problem, tokens, routing.topk_ids);
  return plans;
}

TEST(ShippedProfile, PredictsWholePassesOfFourGpus) {
  std::ifstream file(std::string(UNIEP_RESULTS_DIR) +
                     "/2026-11-20_4xH200_compare_torch_0f1540b.json");
  const auto results = nlohmann::json::parse(file);
  const MachineProfile profile = shipped_profile("h200");
  double sum = 0;
  double worst = 0;
  int count = 0;
  for (const auto& record : results.at("records")) {
    const auto direction = record.at("direction").get<std::string>();
    if (direction != "forward" && direction != "backward") continue;
    const Pass pass = direction == "forward" ? Pass::kForward : Pass::kBackward;
    const auto schedule = record.at("schedule").get<std::string>();
    const double measured = 1e-3 * record.at("ms").get<double>();
    const double predicted = simulate(plans_of(record.at("shape").get<std::string>()), pass,
                                      parse_schedule(schedule), profile)
                                 .seconds;
    const double error = std::abs(predicted / measured - 1);
    EXPECT_LT(error, 0.10) << record.at("shape") << ' ' << direction << ' ' << schedule;
    sum += error;
    worst = std::max(worst, error);
    ++count;
  }
  EXPECT_EQ(count, 40);
  EXPECT_LT(sum / count, 0.05);
  RecordProperty("mean_error_percent", static_cast<int>(std::lround(100 * sum / count)));
  RecordProperty("worst_error_percent", static_cast<int>(std::lround(100 * worst)));
}

}  // namespace
}  // namespace uniep::tune
