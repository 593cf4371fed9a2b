// The shipped profiles against what was measured on 1, 2 and 4 H200 and on one H100: the figures
// that docs/research/cost_model.md quotes. tests/data/README.md says what the files are.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <tuple>

#include "base/check.h"
#include "base/quantile.h"
#include "schedule/token_waves.h"
#include "tune/model/cost_model.h"
#include "tune/model/gathered_hosts.h"
#include "tune/model/parallel.h"
#include "tune/plans_of_shape.h"

namespace uniep::tune {
namespace {

nlohmann::json results(const std::string& name) {
  std::ifstream file(std::string(UNIEP_MEASURED_DIR) + "/" + name);
  return nlohmann::json::parse(file);
}

/// Of kernels that draw a task as those before c595f7e did: in 3.5 us.
MachineProfile with_long_draws() {
  MachineProfile profile = shipped_profile("h200");
  profile.draw_s = 3.5e-6;
  return profile;
}

/// The plans of a case with random routing, made once.
const std::vector<RoutingPlan>& plans_of(const std::string& shape, double skew, int ranks) {
  static std::map<std::tuple<std::string, double, int>, std::vector<RoutingPlan>> made;
  auto& plans = made[{shape, skew, ranks}];
  if (plans.empty()) {
    plans = testing::plans_of_shape(shape.substr(0, shape.find(",skew=")), ranks, skew);
  }
  return plans;
}

Pass pass_of(const nlohmann::json& record) {
  return record.at("direction") == "forward" ? Pass::kForward : Pass::kBackward;
}

/// What a pass takes, simulated once: many files have the same passes.
double predicted_seconds(const std::string& shape, double skew, int ranks, Pass pass,
                         const Schedule& schedule, const MachineProfile& profile) {
  using Key = std::tuple<std::string, double, int, Pass, std::string, std::string>;
  static std::map<Key, double> known;
  const Key key{shape, skew, ranks, pass, to_string(schedule), profile_to_json(profile)};
  const auto at = known.find(key);
  if (at != known.end()) return at->second;
  const double seconds = simulate(plans_of(shape, skew, ranks), pass, schedule, profile).seconds;
  return known.emplace(key, seconds).first->second;
}

/// Seconds, or a ratio of them.
struct Both {
  double measured, predicted;
};

/// Passes of a result file, predicted and measured.
struct Errors {
  int count = 0;
  double mean = 0;
  double worst = 0;

  void add(const Both& seconds) {
    const double error = std::abs(seconds.predicted / seconds.measured - 1);
    mean = (mean * count + error) / (count + 1);
    worst = std::max(worst, error);
    ++count;
  }
};

/// Of the records that `takes` chooses.
template <class F>
Errors errors_against(const std::string& name, F&& takes,
                      const MachineProfile& profile = shipped_profile("h200")) {
  const nlohmann::json file = results(name);
  Errors e;
  for (const auto& record : file.at("records")) {
    const auto direction = record.at("direction").get<std::string>();
    if ((direction != "forward" && direction != "backward") || !takes(record)) continue;
    const Schedule schedule = parse_schedule(record.at("schedule").get<std::string>());
    const double predicted =
        predicted_seconds(record.at("shape").get<std::string>(), record.value("skew", 0.0),
                          record.at("ranks").get<int>(), pass_of(record), schedule, profile);
    e.add({1e-3 * record.at("ms").get<double>(), predicted});
  }
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

TEST(ShippedProfile, PredictsBothPassesOfTinyBatches) {
  const auto all = [](const auto&) { return true; };
  const Errors before =
      errors_against("2026-11-20_4xH200_compare_torch_tiny_f6b86f6.json", all, with_long_draws());
  EXPECT_EQ(before.count, 40);
  EXPECT_LT(before.mean, 0.08);
  EXPECT_LT(before.worst, 0.21);
  const Errors now = errors_against("2026-11-22_2xH200_compare_torch_tiny_c595f7e.json", all);
  EXPECT_EQ(now.count, 60);
  EXPECT_LT(now.mean, 0.07);
  EXPECT_LT(now.worst, 0.24);
}

/// Adds the relative errors for all candidates of a search with two GPUs.
void add_candidate_errors(const std::string& name, const std::string& shape,
                          const MachineProfile& profile, std::vector<double>& errors) {
  const nlohmann::json file = results(name);
  for (const auto& pass : file.at("passes")) {
    for (const auto& candidate : pass.at("candidates")) {
      const Schedule schedule = parse_schedule(candidate.at("schedule").get<std::string>());
      const double measured = 1e-3 * candidate.at("ms").get<double>();
      const double predicted = predicted_seconds(shape, 0, 2, pass_of(pass), schedule, profile);
      errors.push_back(std::abs(predicted / measured - 1));
    }
  }
}

/// Those of searches for all models with 64 and 512 tokens on two GPUs.
std::vector<double> errors_for_tiny_batches(const std::string& commit,
                                            const MachineProfile& profile) {
  std::vector<double> errors;
  for (const char* model :
       {"deepseek-v3", "qwen3-235b", "qwen3-30b", "mixtral-8x7b", "gpt-oss-120b"}) {
    for (const char* tokens : {"64", "512"}) {
      add_candidate_errors(
          cat("2026-11-22_2xH200_tune_", model, "_tokens", tokens, "_", commit, ".json"),
          cat(model, ",tokens=", tokens), profile, errors);
    }
  }
  return errors;
}

/// From the default to four waves of narrow tiles.
TEST(ShippedProfile, PredictsCandidatesForTinyBatches) {
  const std::vector<double> errors = errors_for_tiny_batches("6b02471", with_long_draws());
  EXPECT_GE(errors.size(), 250u);
  EXPECT_LT(median(errors), 0.08);
  EXPECT_LT(*std::ranges::max_element(errors), 0.30);
}

TEST(ShippedProfile, PredictsBackwardCandidatesForTinyBatches) {
  const std::vector<double> errors = errors_for_tiny_batches("c595f7e", shipped_profile("h200"));
  EXPECT_GE(errors.size(), 140u);
  EXPECT_LT(median(errors), 0.06);
  EXPECT_LT(*std::ranges::max_element(errors), 0.22);
}

/// Every pass of some files, of which each has at least `fewest`.
void expect_all_within(std::initializer_list<const char*> names, int fewest, double worst,
                       double mean = 0.05) {
  for (const char* name : names) {
    const Errors e = errors_against(name, [](const auto&) { return true; });
    EXPECT_GE(e.count, fewest) << name;
    EXPECT_LT(e.mean, mean) << name;
    EXPECT_LT(e.worst, worst) << name;
  }
}

TEST(ShippedProfile, PredictsPassesOfFewerGpus) {
  expect_all_within({"2026-11-22_1xH200_compare_torch_cb2d1ba.json",
                     "2026-11-22_1xH200_compare_torch_tuned_cb2d1ba.json",
                     "2026-11-22_2xH200_compare_torch_cb2d1ba.json",
                     "2026-11-22_2xH200_compare_torch_tuned_cb2d1ba.json"},
                    16, 0.10);
}

/// Presets, what the tuner found and the model's choices.
TEST(ShippedProfile, PredictsPassesOfTunedSchedulesOnFourGpus) {
  expect_all_within({"2026-11-20_4xH200_compare_torch_f6b86f6.json"}, 48, 0.10, 0.04);
}

/// In part what it was fitted to.
TEST(ShippedProfile, PredictsPassesOfAnH100) {
  const auto all = [](const auto&) { return true; };
  const MachineProfile h100 = shipped_profile("h100");
  const Errors whole = errors_against("2026-11-23_1xH100_compare_torch_45d4d70.json", all, h100);
  EXPECT_EQ(whole.count, 40);
  EXPECT_LT(whole.mean, 0.065);
  EXPECT_LT(whole.worst, 0.17);
  const Errors tiny =
      errors_against("2026-11-23_1xH100_compare_torch_tiny_45d4d70.json", all, h100);
  EXPECT_EQ(tiny.count, 40);
  EXPECT_LT(tiny.mean, 0.05);
  EXPECT_LT(tiny.worst, 0.18);
}

/// Nothing was fitted to the passes.
TEST(MeasuredProfile, PredictsPassesOfAnH100) {
  const auto all = [](const auto&) { return true; };
  const MachineProfile measured =
      read_profile(std::string(UNIEP_MEASURED_DIR) + "/2026-11-23_1xH100_profile_c1dacec+.json");
  const Errors whole =
      errors_against("2026-11-23_1xH100_compare_torch_45d4d70.json", all, measured);
  EXPECT_EQ(whole.count, 40);
  EXPECT_LT(whole.mean, 0.09);
  EXPECT_LT(whole.worst, 0.22);
  const Errors tiny =
      errors_against("2026-11-23_1xH100_compare_torch_tiny_45d4d70.json", all, measured);
  EXPECT_LT(tiny.mean, 0.105);
  EXPECT_LT(tiny.worst, 0.23);
}

/// Kernels that take less between tiles than those which the profile's products are of.
TEST(ShippedProfile, PredictsPassesOfFasterKernels) {
  expect_all_within({"2026-11-22_1xH200_compare_torch_d42f9d1.json",
                     "2026-11-22_2xH200_compare_torch_d42f9d1.json",
                     "2026-11-22_2xH200_compare_torch_sustained_d42f9d1.json"},
                    24, 0.11);
}

/// Likewise, most of them predicted too long. Sustained are passes in a loop, which run hotter.
TEST(ShippedProfile, PredictsPassesOfFasterKernelsOnFourGpus) {
  expect_all_within({"2026-11-22_4xH200_compare_torch_ac61724.json",
                     "2026-11-22_4xH200_compare_torch_c391a24.json",
                     "2026-11-22_4xH200_compare_torch_6a665d9.json"},
                    40, 0.115, 0.052);
  expect_all_within({"2026-11-22_4xH200_compare_torch_49edc0b.json"}, 40, 0.10, 0.04);
  expect_all_within({"2026-11-22_4xH200_compare_torch_sustained_ac61724.json",
                     "2026-11-22_4xH200_compare_torch_sustained_c391a24.json",
                     "2026-11-22_4xH200_compare_torch_sustained_49edc0b.json",
                     "2026-11-22_4xH200_compare_torch_sustained_6a665d9.json"},
                    30, 0.12, 0.08);
}

/// Small tasks, whole rows over the wire and weight gradients last, measured beside the default of
/// then, whose tasks were those of whole batches, with 128 to 2048 tokens on two GPUs. Where the
/// model has them shorter by as much as `auto` asks for, they are; on average by 3 %, and never
/// longer by more than passes vary.
TEST(ShippedProfile, WhatItTakesForFewTokensIsFaster) {
  const nlohmann::json file = results("2026-11-22_2xH200_compare_torch_small_batches_896b842.json");
  const MachineProfile profile = shipped_profile("h200");
  std::map<std::pair<std::string, Pass>, Both> defaults;
  std::vector<double> gains;
  for (const auto& record : file.at("records")) {
    const auto shape = record.at("shape").get<std::string>();
    const auto direction = record.at("direction").get<std::string>();
    if (direction != "forward" && direction != "backward") continue;
    const Pass pass = pass_of(record);
    const Schedule s = parse_schedule(record.at("schedule").get<std::string>());
    const double measured = 1e-3 * record.at("ms").get<double>();
    const double predicted = predicted_seconds(shape, 0, 2, pass, s, profile);
    const auto [at, is_default] = defaults.try_emplace({shape, pass}, Both{measured, predicted});
    if (is_default || s.tile_n == 128 || s.dispatch_wire != DispatchWire::kRows) continue;
    if (predicted < 0.96 * at->second.predicted) gains.push_back(at->second.measured / measured);
  }
  EXPECT_GE(gains.size(), 20u);
  EXPECT_GT(std::accumulate(gains.begin(), gains.end(), 0.0) / static_cast<double>(gains.size()),
            1.03);
  EXPECT_GT(*std::ranges::min_element(gains), 0.985);
}

/// How many times as fast a layer's forward pass under `single` is with one value of an axis as
/// with another, where a file has both.
Both gain_of(const char* file_name, const std::string& shape, int Schedule::*axis, int from,
             int to) {
  const nlohmann::json file = results(file_name);
  const MachineProfile profile = shipped_profile("h200");
  std::map<int, double> measured, predicted;
  for (const auto& record : file.at("records")) {
    if (record.at("shape") != shape || record.at("direction") != "forward") continue;
    const Schedule s = parse_schedule(record.at("schedule").get<std::string>());
    if (s.launch != LaunchGrouping::kSingle) continue;
    measured[s.*axis] = record.at("ms").get<double>();
    predicted[s.*axis] = predicted_seconds(shape, 0, 4, Pass::kForward, s, profile);
  }
  return {measured.at(from) / measured.at(to), predicted.at(from) / predicted.at(to)};
}

/// With tasks of the sizes of whole batches, a few warps dispatch few tokens, and a few SMs sum
/// them. Gains over the first schedule of each layer and direction, of 64 to 4096 tokens.
TEST(ShippedProfile, KnowsWhatSmallTasksGain) {
  const MachineProfile profile = shipped_profile("h200");
  for (const char* name :
       {"2026-11-23_1xH200_few_tokens_be56357.json", "2026-11-23_2xH200_few_tokens_be56357.json"}) {
    const nlohmann::json file = results(name);
    std::map<std::pair<std::string, Pass>, Both> firsts;
    double measured_gains = 0, distance = 0;
    int count = 0;
    for (const auto& record : file.at("records")) {
      const auto shape = record.at("shape").get<std::string>();
      const Pass pass = pass_of(record);
      const Schedule s = parse_schedule(record.at("schedule").get<std::string>());
      const Both now{1e-3 * record.at("ms").get<double>(),
                     predicted_seconds(shape, 0, record.at("ranks").get<int>(), pass, s, profile)};
      const auto [first, is_first] = firsts.try_emplace({shape, pass}, now);
      if (is_first) continue;
      const double measured = first->second.measured / now.measured;
      measured_gains += measured;
      distance += std::abs(first->second.predicted / now.predicted - measured);
      ++count;
    }
    EXPECT_GE(count, 200) << name;
    EXPECT_GT(measured_gains, 1.03 * count) << name;
    EXPECT_LT(distance, 0.025 * count) << name;
  }
}

/// Without mix_run, rows are pushed faster than the wire takes them for a while, and SMs wait.
TEST(ShippedProfile, KnowsWhatMixedStagesGain) {
  const Both gain = gain_of("2026-11-22_4xH200_compare_torch_c391a24.json", "qwen3-30b",
                            &Schedule::mix_run, 0, 16);
  EXPECT_GT(gain.measured, 1.07);
  EXPECT_NEAR(gain.predicted, gain.measured, 0.03);
}

/// Without a head start, rows are pushed while dispatch still pulls.
TEST(ShippedProfile, KnowsWhatAHeadStartGains) {
  const char* const file = "2026-11-22_4xH200_compare_torch_49edc0b.json";
  for (const auto& [shape, least] : {std::pair{"qwen3-30b", 1.06}, {"qwen3-235b", 1.01}}) {
    const Both gain = gain_of(file, shape, &Schedule::head_start, 0, 40);
    EXPECT_GT(gain.measured, least) << shape;
    EXPECT_NEAR(gain.predicted, gain.measured, 0.03) << shape;
  }
}

/// Of pairs of random schedules whose times differ by a tenth or more, the share that the model
/// puts in the right order.
double share_in_order(const nlohmann::json& file, const nlohmann::json& pass) {
  const auto& plans = plans_of(file.at("shape").get<std::string>(), 0, file.at("ranks").get<int>());
  const MachineProfile profile = shipped_profile("h200");
  const nlohmann::json& points = pass.at("points");
  std::vector<double> measured(points.size()), predicted(points.size());
  for_each_in_parallel(points.size(), [&](std::size_t i) {
    const Schedule s = parse_schedule(points[i].at("schedule").template get<std::string>());
    measured[i] = points[i].at("ms").template get<double>();
    predicted[i] = simulate(plans, pass_of(pass), s, profile).seconds;
  });
  int pairs = 0, in_order = 0;
  for (std::size_t i = 0; i < points.size(); ++i) {
    for (std::size_t j = 0; j < points.size(); ++j) {
      if (measured[i] < 1.1 * measured[j]) continue;
      ++pairs;
      in_order += predicted[i] > predicted[j] ? 1 : 0;
    }
  }
  return in_order / static_cast<double>(pairs);
}

TEST(ShippedProfile, RanksRandomSchedulesAsMeasurementsDo) {
  const nlohmann::json file = results("2026-11-20_4xH200_survey_qwen3-30b.json");
  for (const auto& pass : file.at("passes")) {
    EXPECT_EQ(pass.at("points").size(), 100u);
    EXPECT_GT(share_in_order(file, pass), 0.94) << pass.at("direction");
  }
}

GatheredHost gathered_host_of(const std::string& shape, int ranks, int hosts, CrossesUnder under,
                              bool all_rows) {
  const workload::ShapeSpec spec = workload::parse_shape(shape);
  Problem problem = workload::problem_of(spec);
  problem.capacity_rows = rows_of_any_routing(problem, ranks);
  const auto routing = workload::make_routing(spec, ranks, 0, 0);
  return gathered_host(problem, ranks, hosts, routing.topk_ids, under, all_rows);
}

/// GPUs as hosts, over links of so many bytes a second, with so many SMs spared; `way` is that of
/// benchmarks/over_hosts.py.
Errors errors_over_hosts(const std::string& name, double nic, int spare, const std::string& way) {
  const MachineProfile profile = with_spare_workers(shipped_profile("h200"), spare);
  const CrossesUnder under = way == "in turn" ? CrossesUnder::kNothing : CrossesUnder::kPasses;
  const nlohmann::json file = results(name);
  const bool before_the_seam = file.at("date").get<std::string>() < "2026-11-28";  // token_waves.h
  Errors e;
  GatheredHost host;
  std::string shape_of_host;
  for (const auto& record : file.at("records")) {
    if (record.at("way") != way) continue;
    const int ranks = record.at("ranks").get<int>(), hosts = record.at("hosts").get<int>();
    if (before_the_seam && has_seam(hosts, pass_of(record)) && under == CrossesUnder::kPasses) {
      continue;
    }
    auto shape = record.at("shape").get<std::string>();
    if (const auto most = record.value("limit", nlohmann::json()); !most.is_null()) {
      shape += ",n_group=" + std::to_string(hosts) + ",topk_group=" + most.dump();
    }
    if (shape != shape_of_host) {  // of both directions, which follow one another
      host = gathered_host_of(shape, ranks, hosts, under, record.value("all_rows", false));
      shape_of_host = shape;
    }
    const Topology topology{.ranks_per_node = ranks / hosts, .nic_bytes_per_s = nic};
    const double predicted = simulate_gathered(host, way == "exact hosts", pass_of(record),
                                               default_schedule(Backend::kCuda), profile, topology)
                                 .seconds;
    e.add({1e-3 * record.at("ms").get<double>(), predicted});
  }
  return e;
}

void expect_hosts_predicted(const std::string& name, double nic, int spare, const std::string& way,
                            double mean, double worst, int passes = 10) {
  const Errors e = errors_over_hosts(name, nic, spare, way);
  EXPECT_EQ(e.count, passes) << name << way;
  EXPECT_LT(e.mean, mean) << name << way;
  EXPECT_LT(e.worst, worst) << name << way;
}

TEST(ShippedProfile, PredictsPassesOverHosts) {
  const std::string one_each = "2026-11-26_2xH200_over_hosts_waves";
  for (const std::string way : {"mesh", "in turn"}) {
    expect_hosts_predicted(one_each + ".json", 50e9, 8, way, 0.075, 0.175);
    expect_hosts_predicted(one_each + "_slow_links.json", 24e9, 16, way, 0.075, 0.175);
    expect_hosts_predicted("2026-11-27_4xH100_over_hosts.json", 50e9, 8, way, 0.045, 0.10);
  }
}

TEST(ShippedProfile, PredictsPassesWhoseRowsCross) {
  const std::string rows = "2026-11-27_2xH200_over_hosts_all_rows.json";
  expect_hosts_predicted(rows, 70e9, 8, "mesh", 0.05, 0.08);
  expect_hosts_predicted(rows, 70e9, 8, "in turn", 0.06, 0.09);
  expect_hosts_predicted(rows, 70e9, 8, "exact hosts", 0.085, 0.185);
}

TEST(ShippedProfile, PredictsPassesOverFourHosts) {
  // Four channels of NCCL bring 75 GB/s, and 58 to 65 beside passes (benchmarks/beside_passes.py).
  const std::string limited = "2026-11-28_4xH200_over_hosts_limited.json";
  expect_hosts_predicted(limited, 65e9, 8, "mesh", 0.06, 0.13);
  expect_hosts_predicted(limited, 75e9, 8, "in turn", 0.07, 0.10);
  expect_hosts_predicted(limited, 65e9, 8, "exact hosts", 0.10, 0.20);
  const std::string any = "2026-11-28_4xH200_over_hosts_any.json";
  expect_hosts_predicted(any, 65e9, 8, "mesh", 0.055, 0.165);
  expect_hosts_predicted(any, 65e9, 8, "exact hosts", 0.075, 0.25);
  const std::string slow = "2026-11-27_4xH200_over_hosts_limited_slow_links.json";
  expect_hosts_predicted(slow, 24e9, 16, "mesh", 0.10, 0.165, 5);
  expect_hosts_predicted(slow, 24e9, 16, "in turn", 0.10, 0.165);
  expect_hosts_predicted(slow, 24e9, 16, "exact hosts", 0.10, 0.165, 5);
}

}  // namespace
}  // namespace uniep::tune
