// The contract on several hosts, which share no memory: what crosses between them by rails are
// tokens and rows, or sums of combine groups, and the bits are those of one host.
#include <gtest/gtest.h>

#include "contract/contract_testing.h"
#include "support/cases.h"
#include "support/expect_same.h"
#include "support/random_case.h"
#include "support/scoped_env.h"

namespace uniep::testing {
namespace {

struct Group {
  int ranks;
  int hosts;
};
constexpr Group kGroups[] = {{2, 2}, {4, 2}, {4, 4}, {6, 3}, {8, 2}, {8, 4}};

std::string describe(unsigned seed, const LayerData& d, const RunOptions& o) {
  std::string parts;
  for (const auto begin : o.token_begin) parts += cat(" ", begin);
  return cat("seed ", seed, ", ", o.hosts, " hosts, ", to_string(problem_of(d)), ", tokens", parts,
             "\n  forward ", to_string(o.forward_schedule), "\n  backward ",
             to_string(o.backward_schedule), "\n  save ", name(o.save), ", recompute_h ",
             o.recompute_h, ", ring_tiles ", o.ring_tiles, ", max_delay_us ",
             o.layer.fault_injection.max_delay_us);
}

void expect_bits(const LayerData& data, const RunOptions& o, const std::string& what) {
  try {
    expect_same_bits(run_layer(data, o), expected(data, o), what);
  } catch (const Error& e) {
    ADD_FAILURE() << what << "\n" << e.what();
  }
}

/// One group, so that all rows cross, or as many as hosts or more, so that sums do; or groups that
/// lie on several hosts.
void draw_groups(Rng& rng, int hosts, LayerData& d) {
  std::vector<int> divisors;
  for (int g = 1; g <= d.num_experts; ++g) {
    if (d.num_experts % g == 0) divisors.push_back(g);
  }
  d.combine_groups = chance(rng, 30)   ? 1
                     : chance(rng, 70) ? hosts
                                       : divisors[rng() % divisors.size()];
  d.combine_partials = chance(rng, 50) ? CombinePartials::kFp32 : CombinePartials::kBf16;
}

void run_random_cases(unsigned first_seed, int count, int max_delay_us) {
  for (unsigned seed = first_seed; seed < first_seed + static_cast<unsigned>(count); ++seed) {
    Rng rng(seed);
    const Group group = kGroups[rng() % std::size(kGroups)];
    const bool any = seed % 3 != 0;
    LayerData data = random_layer(rng, group.ranks, {.any_arithmetic = any, .shared_experts = any});
    // Rows of shared experts stay on their rank, among blocks whose tokens and rows cross.
    if (data.shared_experts == 0) draw_groups(rng, group.hosts, data);
    RunOptions o;
    o.hosts = group.hosts;
    o.token_begin = random_parts(rng, data.tokens, group.ranks);
    o.row_align = 16 << pick(rng, 0, 4);
    Problem problem = problem_of(data);
    problem.row_align = o.row_align;
    o.forward_schedule = random_schedule(rng, problem, 4);
    o.backward_schedule = random_schedule(rng, problem, 4);
    o.layer.fault_injection.max_delay_us = max_delay_us;
    o.layer.fault_injection.seed = seed;
    o.defer_weights = chance(rng, 20);
    o.weights_schedule = random_schedule(rng, problem, 4);
    o.save = kSaves[rng() % std::size(kSaves)];
    o.recompute_h = chance(rng, 50);
    o.row_pool = chance(rng, 30);
    if (chance(rng, 20))
      o.layer.fault_injection.first_count = 0u - static_cast<unsigned>(pick(rng, 1, 500));
    if (!o.defer_weights && chance(rng, 40)) o.ring_tiles = static_cast<int>(pick(rng, 0, 3));
    expect_bits(data, o, describe(seed, data, o));
    if (::testing::Test::HasFailure()) return;
  }
}

// 500 cases together with the slow network's; half of them, with two schedules or three each, under
// delays, which take longer.
TEST(ContractOnHosts, AnySchedule) { run_random_cases(1, cases(220), 0); }

TEST(ContractOnHosts, AnyScheduleUnderRandomDelays) { run_random_cases(100001, cases(250), 200); }

TEST(ContractOnHosts, AnyScheduleOverASlowNetwork) {
  const ScopedEnv network("UNIEP_CPU_NETWORK_GBPS", "0.002");
  run_random_cases(200001, cases(30), 0);
}

class Presets : public ::testing::TestWithParam<const char*> {};

INSTANTIATE_TEST_SUITE_P(All, Presets,
                         ::testing::Values("sequential", "pipelined:2", "pipelined:5", "two-kernel",
                                           "single"),
                         [](const auto& test) { return test_name(test.param); });

TEST_P(Presets, RowsOrSumsCross) {
  Rng rng(7);
  LayerData data = random_layer(rng, 8, {.max_tokens = 60});
  for (const Group group : kGroups) {
    if (data.num_experts % group.ranks != 0) continue;
    for (const int groups : {1, group.hosts}) {
      for (const CombinePartials partials : {CombinePartials::kFp32, CombinePartials::kBf16}) {
        data.combine_groups = groups;
        data.combine_partials = partials;
        RunOptions o;
        o.hosts = group.hosts;
        o.token_begin = workload::even_parts(data.tokens, group.ranks);
        o.forward_schedule = o.backward_schedule = parse_schedule(GetParam());
        expect_bits(data, o, describe(0, data, o));
        if (HasFailure()) return;
      }
    }
  }
}

}  // namespace
}  // namespace uniep::testing
