// The C API on the CPU: the bits of the contract with the caller's memory everywhere, saved tensors
// that were moved, several steps at a time, overflow as values, and a sentence for each mistake.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <functional>

#include "api/c_steps.h"
#include "base/check.h"
#include "reference/contract.h"
#include "support/expect_same.h"
#include "support/guarded_memory.h"
#include "support/layer_group.h"

namespace uniep::testing {
namespace {

TEST(CApi, AStepHasTheContractsBitsInAnybodysMemory) {
  for (const bool callers : {true, false}) {
    const CLayer layer(problem_of_batches(), callers);
    CStep step(layer, batch(0));
    step.forward();
    step.backward();
    step.expect_contract(callers ? "caller's memory" : "uniep's memory");
  }
}

TEST(CApi, SeveralForwardsAreOutstandingAndTheirSavedTensorsAreMoved) {
  const CLayer layer(problem_of_batches());
  CStep steps[] = {{layer, batch(1)}, {layer, batch(2)}, {layer, batch(3)}};
  for (CStep& s : steps) s.forward();
  for (CStep& s : steps) s.memory().move();
  for (const int i : {1, 0, 2}) steps[i].backward();
  for (const CStep& s : steps) s.expect_contract("one of three");
}

TEST(CApi, PartsWithOtherStepsBetweenThemAndRowsMoved) {
  const CLayer layer(problem_of_batches());
  CStep first(layer, batch(1)), second(layer, batch(2)), third(layer, batch(3));
  first.forward();
  first.backward(1);
  second.forward();
  first.memory().move();
  second.backward(1);
  third.forward();
  third.backward();
  first.backward(2);
  second.memory().move();
  second.backward(2);
  first.expect_contract("first");
  second.expect_contract("second");
  third.expect_contract("third, whole");
}

TEST(CApi, WeightGradientsAreOverwrittenOrAddedTo) {
  const CLayer layer(problem_of_batches());
  CStep step(layer, batch(1));
  step.forward();
  const LayerData& d = step.data();
  std::vector<float> dw1(d.w1.size(), 0.75f), dw2(d.w2.size(), 0.75f);
  uniep_backward_call call = step.backward_call();
  call.weight_grad = 1;
  call.dw1 = dw1.data();
  call.dw2 = dw2.data();
  expect_ok(uniep_backward(layer.get(), &call));
  const LayerResult fp32 = reference::contract_into_main_grad(
      d, std::vector<float>(d.w1.size(), 0.75f), std::vector<float>(d.w2.size(), 0.75f));
  expect_same_bits(dw1, fp32.main_dw1, "dw1", "fp32");
  expect_same_bits(dw2, fp32.main_dw2, "dw2", "fp32");

  std::vector<bf16> main1(d.w1.size(), to_bf16(0.75f)), main2(d.w2.size(), to_bf16(-3.0f));
  const LayerResult want = reference::contract_into_bf16_main_grad(d, main1, main2);
  call.weight_grad = 2;
  call.dw1 = main1.data();
  call.dw2 = main2.data();
  expect_ok(uniep_backward(layer.get(), &call));
  expect_same_bits(main1, want.dw1, "dw1", "bf16");
  expect_same_bits(main2, want.dw2, "dw2", "bf16");
}

/// By part: a whole backward pass, or one in two.
class Overflow : public ::testing::TestWithParam<int> {};

INSTANTIATE_TEST_SUITE_P(Parts, Overflow, ::testing::Values(0, 1));

TEST_P(Overflow, IsAValueAndTheLayerGoesOn) {
  Problem p = problem_of_batches();
  p.row_align = 16;
  p.capacity_rows = 48;
  p.max_tokens = 40;
  const CLayer layer(p);
  LayerData data = plain_layer(1, 40);
  std::ranges::fill(data.topk_ids, 1);
  CStep step(layer, data);
  std::array<std::int64_t, 2> overflow{-1, -1};
  uniep_forward_call forward = step.forward_call();
  forward.overflow = overflow.data();
  expect_ok(uniep_forward(layer.get(), &forward));
  EXPECT_EQ(overflow, (std::array<std::int64_t, 2>{1, 80}));
  for (const bf16 v : step.result().out) ASSERT_TRUE(std::isnan(to_float(v)));

  std::fill(step.result().dx.begin(), step.result().dx.end(), bf16{});
  std::vector<bf16> kept1 = step.result().dw1, kept2 = step.result().dw2;
  const auto run_backward = [&](int weight_grad) {
    for (int part : {1, 2}) {
      if (GetParam() == 0 && part == 2) break;
      uniep_backward_call call = step.backward_call(GetParam() == 0 ? 0 : part);
      call.weight_grad = weight_grad;
      call.ignore_overflow = 1;
      expect_ok(uniep_backward(layer.get(), &call));
    }
  };
  run_backward(2);
  EXPECT_EQ(step.result().dw1, kept1);
  EXPECT_EQ(step.result().dw2, kept2);
  run_backward(0);
  for (const bf16 v : step.result().dx) ASSERT_TRUE(std::isnan(to_float(v)));
  for (const float v : step.result().dprobs) ASSERT_EQ(v, 0.0f);
  for (const bf16 v : step.result().dw1) ASSERT_EQ(v.bits, 0);
  for (const bf16 v : step.result().dw2) ASSERT_EQ(v.bits, 0);

  // In place: the call holds the address.
  std::ranges::copy(plain_layer(1, 40).topk_ids, step.data().topk_ids.begin());
  step.data().topk_ids[7] = p.num_experts;
  expect_ok(uniep_forward(layer.get(), &forward));
  EXPECT_EQ(overflow, (std::array<std::int64_t, 2>{2, 0}));
  for (const bf16 v : step.result().out) ASSERT_TRUE(std::isnan(to_float(v)));

  CStep good(layer, batch(0));
  forward = good.forward_call();
  forward.overflow = overflow.data();
  expect_ok(uniep_forward(layer.get(), &forward));
  EXPECT_EQ(overflow, (std::array<std::int64_t, 2>{0, 32}));
  uniep_backward_call call = good.backward_call();
  call.ignore_overflow = 1;
  expect_ok(uniep_backward(layer.get(), &call));
  good.expect_contract("after an overflow");
}

TEST(CApi, SchedulesAreTextsOfTheLayerAndOfACall) {
  const CLayer layer(problem_of_batches());
  char text[1024];
  for (const int pass : {0, 1}) {
    expect_ok(uniep_layer_schedule(layer.get(), pass, text, sizeof(text)));
    EXPECT_EQ(std::string(text), to_string(parse_schedule("single,tile_m=16")));
  }
  expect_refused(uniep_layer_schedule(layer.get(), 0, text, 5),
                 cat("size is 5; ", std::strlen(text) + 1, " or more are accepted"));
  expect_refused(uniep_layer_schedule(layer.get(), 2, text, sizeof(text)),
                 "pass is 2; 0 (forward) and 1 (backward) are accepted");
  CStep step(layer, batch(0));
  uniep_forward_call forward = step.forward_call();
  forward.schedule = "sequential,tile_m=32";
  for (int i = 0; i < 2; ++i) expect_ok(uniep_forward(layer.get(), &forward));
  uniep_backward_call backward = step.backward_call();
  backward.schedule = "pipelined:3";
  expect_ok(uniep_backward(layer.get(), &backward));
  step.expect_contract("schedules of calls");
  forward.schedule = "sequential,tile_m=48";
  EXPECT_EQ(uniep_forward(layer.get(), &forward), 1) << "48 divides no alignment";
}

TEST(CApi, ReleaseIsCalledWhenTheLayerIsDestroyed) {
  const Problem problem = problem_of_batches();
  const uniep_problem p = c_problem(problem);
  uniep_memory_needs needs{};
  expect_ok(uniep_needs(&p, 0, 1, &needs));
  const GuardedMemory symmetric(needs.symmetric);
  int released = 0;
  uniep_layer_config config{};
  config.symmetric = symmetric.data();
  config.release = [](void* count) { ++*static_cast<int*>(count); };
  config.release_context = &released;
  uniep_group* group = group_of_one();
  uniep_layer* layer = nullptr;
  expect_ok(uniep_layer_create(group, &p, &config, &layer));
  EXPECT_EQ(released, 0);
  uniep_layer_destroy(layer);
  EXPECT_EQ(released, 1);
  config.schedule = "single,tile_m=256";
  EXPECT_NE(uniep_layer_create(group, &p, &config, &layer), 0);
  EXPECT_EQ(released, 1);
  uniep_group_destroy(group);
}

TEST(CApi, NeedsAreThoseOfTheLayer) {
  uniep_problem p = c_problem(problem_of_batches());
  uniep_memory_needs needs{};
  expect_ok(uniep_needs(&p, 0, 1, &needs));
  EXPECT_EQ(needs.rows, capacity_rows(problem_of_batches(), 1));
  EXPECT_EQ(needs.alignment, 64);
  p.row_align = 0;
  uniep_memory_needs by_default{};
  expect_ok(uniep_needs(&p, 0, 1, &by_default));
  EXPECT_EQ(by_default.rows, needs.rows) << "row_align is 128 by default";
  p.hidden = 9;
  expect_refused(uniep_needs(&p, 0, 1, &needs),
                 "problem.hidden is 9; a multiple of 8 from 8 to 1048576 is accepted");
  p = c_problem(problem_of_batches());
  expect_refused(uniep_needs(&p, 2, 1, &needs), "backend is 2; 0 (cpu) and 1 (cuda) are accepted");
  expect_refused(uniep_needs(nullptr, 0, 1, &needs), "problem is NULL; an address is accepted");
  p.topk = std::int64_t{1} << 40;
  expect_refused(uniep_needs(&p, 0, 1, &needs),
                 "problem.topk is 1099511627776; a number of 32 bits is accepted");
  if (uniep_has_cuda() == 0) {
    p = c_problem(problem_of_batches());
    expect_refused(uniep_needs(&p, 1, 1, &needs),
                   "this build of uniep has no CUDA backend; one configured with -DUNIEP_CUDA=ON "
                   "has",
                   ErrorCode::kUnsupported);
  }
}

TEST(CApi, EveryMistakeOfACallIsASentence) {
  const CLayer layer(problem_of_batches());
  CStep step(layer, batch(0));
  const auto forward_refused = [&](const std::function<void(uniep_forward_call&)>& spoil,
                                   const std::string& sentence) {
    uniep_forward_call call = step.forward_call();
    spoil(call);
    expect_refused(uniep_forward(layer.get(), &call), "rank 0: " + sentence);
  };
  forward_refused([](auto& c) { c.tokens = 13; }, "tokens is 13; 0 to max_tokens=12 is accepted");
  forward_refused([](auto& c) { c.x = nullptr; }, "x is NULL; an address is accepted");
  forward_refused([](auto& c) { c.plan = nullptr; }, "plan is NULL; an address is accepted");
  forward_refused([](auto& c) { c.memory.h = nullptr; }, "h is NULL; an address is accepted");
  forward_refused([](auto& c) { c.waves.count = -1; }, "waves.count is -1; 0 or more is accepted");
  forward_refused([](auto& c) { c.waves.count = 1; },
                  "waves.before is NULL; an address is accepted");
  void* const events[] = {nullptr};
  forward_refused(
      [&](auto& c) {
        c.waves = {events, events, 1};
      },
      "waves.before has 1 events; none of this pass is accepted");
  forward_refused(
      [&](auto& c) {
        c.waves = {nullptr, events, 1};
      },
      "waves.after has 1 events; none of this pass is accepted");
  const auto* misaligned = step.memory().h.data() + 2;
  forward_refused([&](auto& c) { c.memory.h = const_cast<std::byte*>(misaligned); },
                  cat("memory.h starts at address ", reinterpret_cast<std::uintptr_t>(misaligned),
                      "; a multiple of 64 is accepted"));
  const auto odd = [](const void* address) { return static_cast<const std::byte*>(address) + 1; };
  for (const auto& spoil : std::vector<std::function<void(uniep_forward_call&)>>{
           [&](auto& c) { c.x = odd(c.x); }, [&](auto& c) { c.w1 = odd(c.w1); },
           [&](auto& c) { c.w2 = odd(c.w2); }}) {
    uniep_forward_call call = step.forward_call();
    spoil(call);
    EXPECT_EQ(uniep_forward(layer.get(), &call), 1);
    EXPECT_TRUE(std::string(uniep_last_error()).ends_with("; a multiple of 2 is accepted"))
        << uniep_last_error();
  }
  step.forward();
  const auto backward_refused = [&](const std::function<void(uniep_backward_call&)>& spoil,
                                    const std::string& sentence, int part = 0) {
    uniep_backward_call call = step.backward_call(part);
    spoil(call);
    expect_refused(uniep_backward(layer.get(), &call), sentence);
  };
  backward_refused([](auto& c) { c.part = 3; },
                   "rank 0: part is 3; 0 (whole), 1 (data) and 2 (weights) are accepted");
  backward_refused([](auto& c) { c.weight_grad = 3; },
                   "rank 0: weight_grad is 3; 0 (bf16, overwritten), 1 (fp32, added to) and 2 "
                   "(bf16, added to) are accepted");
  backward_refused([](auto& c) { c.ignore_overflow = 2; },
                   "rank 0: ignore_overflow is 2; 0 and 1 are accepted");
  backward_refused([](auto& c) { c.rows = 129; },
                   cat("rank 0: rows is 129; a multiple of row_align=128 below ",
                       layer.needs().rows, " is accepted, or that capacity"));
  backward_refused([](auto& c) { c.backward_memory = nullptr; },
                   "rank 0: backward_memory is NULL; an address is accepted", 1);
  backward_refused(
      [&](auto& c) {
        c.waves = {events, events, 1};
      },
      "rank 0: waves.before has 1 events; none of this pass is accepted");
  backward_refused([](auto& c) { c.dw2 = nullptr; }, "dw2 is NULL; an address is accepted", 2);
  backward_refused([](auto& c) { c.tokens = 3; },
                   "rank 0: memory.plan holds a plan of 12 tokens; one of 3 is accepted");
  expect_refused(uniep_forward(layer.get(), nullptr),
                 "rank 0: call is NULL; an address is accepted");
  expect_refused(uniep_forward(nullptr, nullptr), "layer is NULL; an address is accepted");
  step.backward();
  step.expect_contract("after all these");

  LayerData bad = batch(0);
  bad.topk_ids[2] = 9;
  CStep of_bad(layer, bad);
  const uniep_forward_call call = of_bad.forward_call();
  expect_refused(uniep_forward(layer.get(), &call),
                 "topk_ids of rank 0, token 1, slot 0 is 9; -1 (dropped) to 1 is accepted");
}

}  // namespace
}  // namespace uniep::testing
