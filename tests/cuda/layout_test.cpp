// Sizes of the CUDA backend's memory, and what it refuses; needs no GPU.
#include <gtest/gtest.h>

#include "cuda/cuda_schedules.h"
#include "cuda/plan_memory.h"
#include "support/cases.h"

namespace uniep::testing {
namespace {

TEST(Arithmetic, EveryOneIsAccepted) {
  const auto reason_of = [](auto change) {
    Problem p{.hidden = 64, .intermediate = 64, .num_experts = 2, .topk = 1, .max_tokens = 8};
    change(p);
    return cuda::unsupported_reason(p, 1).value_or("");
  };
  EXPECT_EQ(reason_of([](Problem&) {}), "");
  for (int i = 0; i < kNumActivations; ++i) {
    EXPECT_EQ(reason_of([i](Problem& p) { p.activation = static_cast<Activation>(i); }), "");
  }
  EXPECT_EQ(reason_of([](Problem& p) { p.probs = Probs::kAfter, p.bias = true; }), "");
  EXPECT_EQ(reason_of([](Problem& p) { p.bias = true, p.backward_rows = 128; }), "");
  EXPECT_EQ(reason_of([](Problem& p) { p.combine_groups = 2; }), "");
  EXPECT_EQ(reason_of([](Problem& p) { p.shared_experts = 2; }), "");
}

TEST(OrderMemory, TheMostIsEnoughForEverySchedule) {
  for (unsigned seed = 1; seed <= static_cast<unsigned>(cases(2000)); ++seed) {
    Rng rng(seed);
    const int ranks = 1 << pick(rng, 0, 3);
    Problem problem{.hidden = 64,
                    .intermediate = 64,
                    .num_experts = ranks * static_cast<int>(pick(rng, 1, 40)),
                    .topk = static_cast<int>(pick(rng, 1, 8)),
                    .max_tokens = pick(rng, 0, 3000)};
    if (chance(rng, 30)) problem.backward_rows = 1024;
    const Schedule schedule = random_cuda_schedule(rng, problem);
    for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
      ASSERT_LE(cuda::DeviceOrderLayout(problem, ranks, pass, schedule).bytes,
                cuda::most_order_bytes(problem, ranks))
          << "seed " << seed << ", " << to_string(problem) << ", " << to_string(schedule);
    }
  }
}

}  // namespace
}  // namespace uniep::testing
