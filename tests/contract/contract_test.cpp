// The numerics contract: any layer, any schedule, any number of ranks and workers, any order of
// arrival, gives the bits of the sequential reference.
#include "reference/contract.h"

#include <gtest/gtest.h>

#include <cstdlib>

#include "base/check.h"
#include "support/expect_same.h"
#include "support/random_case.h"
#include "support/run_layer.h"

namespace uniep::testing {
namespace {

/// Random cases in a test; UNIEP_TEST_CASES multiplies them (sanitizers are slow, nights are long).
int cases(int count) {
  const char* factor = std::getenv("UNIEP_TEST_CASES");
  return factor == nullptr ? count : std::max(1, static_cast<int>(count * std::atof(factor)));
}

Problem problem_of(const LayerData& d) {
  return {.hidden = d.hidden,
          .intermediate = d.intermediate,
          .num_experts = d.num_experts,
          .topk = d.topk,
          .max_tokens = d.tokens};
}

std::string describe(unsigned seed, const LayerData& d, const RunOptions& o) {
  std::string parts;
  for (const auto begin : o.token_begin) parts += cat(" ", begin);
  return cat("seed ", seed, ", ", to_string(problem_of(d)), ", tokens", parts, "\n  forward ",
             to_string(o.forward_schedule), "\n  backward ", to_string(o.backward_schedule),
             "\n  main_grad ", o.main_grad, ", max_delay_us ", o.layer.faults.max_delay_us);
}

LayerResult expected(const LayerData& d, bool main_grad, float start) {
  if (!main_grad) return reference::contract(d);
  return reference::contract_into_main_grad(d, std::vector<float>(d.w1.size(), start),
                                            std::vector<float>(d.w2.size(), start));
}

constexpr int kRanks[] = {1, 2, 3, 4, 5, 8};

void run_random_cases(unsigned first_seed, int count, int max_delay_us) {
  for (unsigned seed = first_seed; seed < first_seed + static_cast<unsigned>(count); ++seed) {
    Rng rng(seed);
    const int ranks = kRanks[pick(rng, 0, 5)];
    const LayerData data = random_layer(rng, ranks);
    RunOptions o;
    o.token_begin = random_parts(rng, data.tokens, ranks);
    o.forward_schedule = random_schedule(rng, problem_of(data), 4);
    o.backward_schedule = random_schedule(rng, problem_of(data), 4);
    o.main_grad = chance(rng, 30);
    o.main_grad_start = 0.75f;
    o.layer.faults.max_delay_us = max_delay_us;
    o.layer.faults.seed = seed;
    expect_same_bits(run_layer(data, o), expected(data, o.main_grad, o.main_grad_start),
                     describe(seed, data, o));
    if (::testing::Test::HasFailure()) return;
  }
}

TEST(Contract, AnyScheduleAnyRanks) { run_random_cases(1, cases(3000), 0); }

TEST(Contract, AnyScheduleUnderRandomDelays) { run_random_cases(100001, cases(300), 200); }

}  // namespace
}  // namespace uniep::testing
