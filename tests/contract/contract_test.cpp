// The numerics contract: any layer, any schedule, any number of ranks and workers, any order of
// arrival, gives the bits of the sequential reference.
#include "reference/contract.h"

#include <gtest/gtest.h>

#include <functional>

#include "contract/contract_testing.h"
#include "support/cases.h"
#include "support/expect_same.h"
#include "support/random_case.h"

namespace uniep::testing {
namespace {

std::string describe(unsigned seed, const LayerData& d, const RunOptions& o) {
  std::string parts;
  for (const auto begin : o.token_begin) parts += cat(" ", begin);
  return cat("seed ", seed, ", ", to_string(problem_of(d)), ", tokens", parts, "\n  forward ",
             to_string(o.forward_schedule), "\n  backward ", to_string(o.backward_schedule),
             o.defer_weights ? "\n  weights  " + to_string(o.weights_schedule) : "",
             "\n  row_align ", o.row_align, ", save ", name(o.save), ", recompute_h ",
             o.recompute_h, ", main_grad ", o.main_grad, ", bf16_main_grad ", o.bf16_main_grad,
             ", callers_memory ", o.callers_memory, ", exact_rows ", o.exact_rows, ", row_pool ",
             o.row_pool, ", ring_tiles ", o.ring_tiles, ", gathered_hosts ", o.gathered_hosts,
             ", first_host ", o.first_host, ", slot_rows ", o.slot_rows, ", max_delay_us ",
             o.layer.fault_injection.max_delay_us, ", forms ", to_string(o.forms));
}

constexpr int kRanks[] = {1, 2, 3, 4, 5, 8};

void run_random_cases(unsigned first_seed, int count, int max_delay_us, bool any_form = false) {
  for (unsigned seed = first_seed; seed < first_seed + static_cast<unsigned>(count); ++seed) {
    Rng rng(seed);
    const int ranks = kRanks[pick(rng, 0, 5)];
    const LayerData data = random_layer(
        rng, ranks, {.any_arithmetic = seed % 3 != 0, .shared_experts = seed % 3 != 0});
    RunOptions o;
    o.token_begin = random_parts(rng, data.tokens, ranks);
    o.row_align = 16 << pick(rng, 0, 4);
    Problem problem = problem_of(data);
    problem.row_align = o.row_align;
    o.forward_schedule = random_schedule(rng, problem, 4);
    o.backward_schedule = random_schedule(rng, problem, 4);
    o.main_grad = chance(rng, 30);
    o.main_grad_start = 0.75f;
    o.layer.fault_injection.max_delay_us = max_delay_us;
    o.layer.fault_injection.seed = seed;
    o.defer_weights = chance(rng, 30);
    o.weights_schedule = random_schedule(rng, problem, 4);
    o.bf16_main_grad = !o.main_grad && chance(rng, 30);
    o.callers_memory = chance(rng, 30);
    o.exact_rows = chance(rng, 50);
    o.save = kSaves[rng() % std::size(kSaves)];
    o.recompute_h = chance(rng, 50);
    if (chance(rng, 20))
      o.layer.fault_injection.first_count = 0u - static_cast<unsigned>(pick(rng, 1, 500));
    o.row_pool = !o.callers_memory && chance(rng, 50);
    if (!o.defer_weights && chance(rng, 40)) o.ring_tiles = static_cast<int>(pick(rng, 0, 3));
    if (chance(rng, 30)) {
      o.gathered_hosts = static_cast<int>(pick(rng, 2, 5));
      o.first_host = static_cast<int>(pick(rng, -1, o.gathered_hosts - 1));
    }
    o.slot_rows = data.shared_experts == 0 && chance(rng, 25);
    if (any_form) o.forms = random_forms(rng, is_gated(data.activation));
    expect_same_bits(run_layer(data, o), expected(data, o), describe(seed, data, o));
    if (::testing::Test::HasFailure()) return;
  }
}

TEST(Contract, AnyScheduleAnyRanks) { run_random_cases(1, cases(3000), 0); }

TEST(Contract, AnyScheduleUnderRandomDelays) { run_random_cases(100001, cases(300), 200); }

TEST(Contract, WeightsMayLieAnywhere) { run_random_cases(200001, cases(600), 0, true); }

/// What a backward of a layer with a shared expert says of arguments that were spoilt.
std::string refusal_of_shared(const std::function<void(BackwardArgs&)>& spoil) {
  Rng rng(7);
  LayerData data = random_layer(rng, 1, {.max_tokens = 8});
  data.shared_experts = 1;
  draw_shared(rng, data);
  const workload::Split split(data, 1);
  LayerResult result = workload::make_result(data, {.backward = true});
  Layer layer(split.problem(), Communicator::cpu_group(1)[0]);
  const RoutingPlan plan = layer.plan(split.topk_ids(0));
  const Saved saved = layer.forward(plan, split.forward_args(0, result));
  BackwardArgs args = split.backward_args(0, result);
  spoil(args);
  try {
    layer.backward(saved, args);
  } catch (const Error& e) {
    return e.what();
  }
  return "it was accepted";
}

TEST(Contract, SharedGradientsAreOneTensor) {
  const std::string said = refusal_of_shared([](BackwardArgs& args) {
    const auto one = std::get<ExpertMatrices<bf16>>(args.dshared_w1).tensor();
    args.dshared_w1 = ExpertMatrices<bf16>::interleaved(one);
  });
  EXPECT_NE(said.find("dshared_w1"), said.npos) << said;
  EXPECT_NE(said.find("one tensor"), said.npos) << said;
}

TEST(Contract, SharedGradientsAreOfTheKindOfTheOthers) {
  std::vector<float> sums;
  const std::string said = refusal_of_shared([&](BackwardArgs& args) {
    sums.resize(std::get<ExpertMatrices<bf16>>(args.dw2).size());
    args.dw2 = std::span<float>(sums);
  });
  EXPECT_NE(said.find("of another kind than dw1"), said.npos) << said;
}

}  // namespace
}  // namespace uniep::testing
