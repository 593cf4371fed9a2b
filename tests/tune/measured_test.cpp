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

/// The plans of a record's case with random routing, made once.
const std::vector<RoutingPlan>& plans_of(const nlohmann::json& record) {
  static std::map<std::string, std::vector<RoutingPlan>> made;
  const auto name = record.at("shape").get<std::string>();
  auto& plans = made[name];
  if (!plans.empty()) return plans;
  const workload::ShapeSpec spec = workload::parse_shape(name.substr(0, name.find(",skew=")));
  const double skew = record.value("skew", 0.0);
  const workload::Routing routing = workload::make_routing(spec, kRanks, 0, skew);
  const std::int64_t any_routing = kRanks * spec.tokens * spec.topk + spec.num_experts * 128;
  const Problem problem = workload::problem_of(spec, any_routing);
  const std::vector<std::int64_t> tokens(kRanks, spec.tokens);
  plans = plans_to_simulate(problem, tokens, routing.topk_ids);
  return plans;
}

/// Passes of a result file, predicted and measured.
struct Errors {
  int count = 0;
  double mean = 0;
  double worst = 0;
};

/// Of the records that `takes` chooses.
template <class F>
Errors errors_against(const std::string& name, F&& takes) {
  std::ifstream file(std::string(UNIEP_RESULTS_DIR) + "/" + name);
  const auto results = nlohmann::json::parse(file);
  const MachineProfile profile = shipped_profile("h200");
  Errors e;
  for (const auto& record : results.at("records")) {
    const auto direction = record.at("direction").get<std::string>();
    if ((direction != "forward" && direction != "backward") || !takes(record)) continue;
    const Pass pass = direction == "forward" ? Pass::kForward : Pass::kBackward;
    const Schedule schedule = parse_schedule(record.at("schedule").get<std::string>());
    const auto& plans = plans_of(record);
    const double measured = 1e-3 * record.at("ms").get<double>();
    const double error = std::abs(simulate(plans, pass, schedule, profile).seconds / measured - 1);
    ++e.count;
    e.mean += error;
    e.worst = std::max(e.worst, error);
  }
  e.mean /= std::max(e.count, 1);
  return e;
}

TEST(ShippedProfile, PredictsWholePassesOfFourGpus) {
  const Errors e = errors_against("2026-11-20_4xH200_compare_torch_0f1540b.json",
                                  [](const auto&) { return true; });
  EXPECT_EQ(e.count, 40);
  EXPECT_LT(e.mean, 0.05);
  EXPECT_LT(e.worst, 0.10);
}

TEST(ShippedProfile, PredictsForwardPassesOfTinyBatches) {
  const Errors e = errors_against(
      "2026-11-20_4xH200_compare_torch_skew_tiny_a54b381.json", [](const auto& record) {
        return record.at("tokens") <= 512 && record.at("direction") == "forward";
      });
  EXPECT_EQ(e.count, 20);
  EXPECT_LT(e.mean, 0.10);
  EXPECT_LT(e.worst, 0.20);
}

TEST(ShippedProfile, PredictsPassesOfSkewedRoutings) {
  const Errors e = errors_against("2026-11-20_4xH200_compare_torch_skew_tiny_a54b381.json",
                                  [](const auto& record) { return record.at("skew") > 0; });
  EXPECT_EQ(e.count, 40);
  EXPECT_LT(e.mean, 0.05);
  EXPECT_LT(e.worst, 0.15);
}

}  // namespace
}  // namespace uniep::tune
