// Step after step on the same layer, under changing schedules and random delays: every step has the
// bits of the sequential reference, no wait expires, and memory does not grow.
#include "support/soak.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "base/check.h"
#include "layer/arguments.h"
#include "reference/contract.h"
#include "support/cases.h"
#include "support/expect_same.h"
#include "uniep/layer.h"
#include "workload/split.h"

namespace uniep::testing {
namespace {

/// Of these steps the first may still take memory that later ones use again.
constexpr int kSteps = 200;
constexpr std::int64_t kMayGrow = 24 << 20;  // a step's rows of all ranks take 1 MB

struct Schedules {
  Schedule forward, backward, weights;
};

void run_step(Layer& layer, const workload::Split& split, LayerResult& result, bool defer_weights,
              const Schedules& s) {
  const int rank = layer.communicator().rank();
  const BackwardArgs args = split.backward_args(rank, result);
  const RoutingPlan plan = layer.plan(split.topk_ids(rank));
  Saved saved = layer.forward(plan, split.forward_args(rank, result), s.forward);
  if (!defer_weights) return layer.backward(saved, args, s.backward);
  layer.backward_data(saved, data_args(args), s.backward);
  layer.backward_weights(saved, weights_args(args), s.weights);
}

TEST(Soak, EveryStepHasTheBitsOfTheReferenceAndMemoryDoesNotGrow) {
  constexpr int kRanks = 4;
  constexpr int kStraggler = 1;
  const SoakSteps steps(kRanks, 72, 40);
  const Problem problem = steps.problem();
  const auto group = Communicator::cpu_group(kRanks);
  std::vector<std::optional<Layer>> layers(kRanks);
  run_ranks(group, [&](Communicator& c) {
    FaultInjection faults{.seed = 1, .first_count = 0u - 200};
    if (c.rank() == kStraggler) faults.max_delay_us = 40;
    layers[static_cast<std::size_t>(c.rank())].emplace(problem, c,
                                                       LayerOptions{.fault_injection = faults});
  });
  const int count = cases(kSteps);
  std::int64_t resident = 0;
  for (int number = 1; number <= count; ++number) {
    SoakSteps::Step step = steps.step(number);
    const Schedules schedules{random_schedule(step.rng, problem, 3),
                              random_schedule(step.rng, problem, 3),
                              random_schedule(step.rng, problem, 3)};
    const workload::Split split(step.data, step.token_begin);
    LayerResult result = workload::make_result(step.data, {});
    run_ranks(group, [&](Communicator& c) {
      run_step(*layers[static_cast<std::size_t>(c.rank())], split, result, step.defer_weights,
               schedules);
    });
    expect_same_bits(result, reference::contract(step.data),
                     cat("step ", number, "\n  forward  ", to_string(schedules.forward),
                         "\n  backward ", to_string(schedules.backward)));
    if (HasFailure()) return;
    if (number == std::max(count / 4, 1)) resident = resident_bytes();
  }
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
  EXPECT_LT(resident_bytes() - resident, kMayGrow);
#endif
}

}  // namespace
}  // namespace uniep::testing
