// The C API: activations, probabilities behind fc2, and biases.
#include <gtest/gtest.h>

#include <cstring>

#include "api/c_steps.h"
#include "base/check.h"
#include "reference/contract.h"
#include "support/expect_same.h"
#include "support/layer_group.h"

namespace uniep::testing {
namespace {

/// A batch with another activation, biases, probabilities behind fc2, and combine groups.
LayerData batch_of(Activation activation, Probs probs) {
  LayerData d = batch(1);
  Rng rng(7);
  d.activation = activation;
  d.probs = probs;
  d.combine_groups = d.num_experts / 2;
  d.combine_partials = probs == Probs::kAfter ? CombinePartials::kBf16 : CombinePartials::kFp32;
  d.w1 = random_bf16(rng, d.num_experts * d.w1_rows() * d.hidden, 0.3f);
  d.b1 = random_bf16(rng, d.num_experts * d.w1_rows(), 1);
  d.b2 = random_bf16(rng, d.num_experts * d.hidden, 1);
  return d;
}

Problem problem_of(const LayerData& d) {
  Problem problem = problem_of_batches();
  problem.activation = d.activation;
  problem.probs = d.probs;
  problem.bias = d.has_bias();
  problem.combine_groups = d.combine_groups;
  problem.combine_partials = d.combine_partials;
  return problem;
}

TEST(CApi, EveryArithmeticHasTheContractsBits) {
  for (int activation = 0; activation < kNumActivations; ++activation) {
    for (const Probs probs : {Probs::kBefore, Probs::kAfter}) {
      const LayerData data = batch_of(static_cast<Activation>(activation), probs);
      const CLayer layer(problem_of(data));
      CStep whole(layer, data), parts(layer, data);
      const std::string what = cat(name(data.activation), ", probs ", name(probs));
      whole.forward();
      whole.backward();
      whole.expect_contract(what);
      parts.forward();
      parts.backward(1);
      parts.backward(2);
      parts.expect_contract(what + ", in parts");
    }
  }
}

TEST(CApi, BiasGradientsAreAddedTo) {
  const LayerData d = batch_of(Activation::kGptOss, Probs::kAfter);
  const CLayer layer(problem_of(d));
  CStep step(layer, d);
  step.forward();
  const auto starts = [](const auto& like) { return std::vector<float>(like.size(), 0.75f); };
  auto dw1 = starts(d.w1), dw2 = starts(d.w2), db1 = starts(d.b1), db2 = starts(d.b2);
  const LayerResult want = reference::contract_into_main_grad(d, dw1, dw2, db1, db2);
  uniep_backward_call call = step.backward_call();
  call.weight_grad = 1;
  call.dw1 = dw1.data();
  call.dw2 = dw2.data();
  call.db1 = db1.data();
  call.db2 = db2.data();
  expect_ok(uniep_backward(layer.get(), &call));
  expect_same_bits(db1, want.main_db1, "db1", "fp32");
  expect_same_bits(db2, want.main_db2, "db2", "fp32");
}

TEST(CApi, BiasesAreAskedForOrRefused) {
  const LayerData biased = batch_of(Activation::kReglu, Probs::kBefore);
  const CLayer with(problem_of(biased)), without(problem_of_batches());
  CStep step(with, biased), other(without, batch(1));
  uniep_forward_call forward = step.forward_call();
  forward.b2 = nullptr;
  expect_refused(uniep_forward(with.get(), &forward), "rank 0: b2 is NULL; an address is accepted");
  forward = other.forward_call();
  forward.b1 = biased.b1.data();
  expect_refused(uniep_forward(without.get(), &forward),
                 "rank 0: b1 is given, and this layer has no biases; NULL is accepted, or "
                 "problem.bias=1");
  step.forward();
  uniep_backward_call backward = step.backward_call();
  backward.db1 = nullptr;
  expect_refused(uniep_backward(with.get(), &backward),
                 "rank 0: db1 is NULL; an address is accepted");
  uniep_problem p = c_problem(problem_of_batches());
  uniep_memory_needs needs{};
  p.activation = 10;
  expect_refused(uniep_needs(&p, 0, 1, &needs),
                 "problem.activation is 10; 0 to 9 (swiglu, geglu, geglu_tanh, reglu, gpt_oss, "
                 "swiglu_clamped, swiglu_softcapped, relu2, gelu, silu) are accepted");
  p.activation = 0;
  p.probs = 2;
  expect_refused(uniep_needs(&p, 0, 1, &needs),
                 "problem.probs is 2; 0 (before) and 1 (after) are accepted");
  p.probs = 0;
  p.combine_groups = 3;
  expect_refused(uniep_needs(&p, 0, 1, &needs),
                 "problem.combine_groups is 3; a divisor of num_experts=" +
                     std::to_string(p.num_experts) + " from 1 on is accepted");
  p.combine_groups = 0;
  p.combine_partials = 2;
  expect_refused(uniep_needs(&p, 0, 1, &needs),
                 "problem.combine_partials is 2; 0 (fp32) and 1 (bf16) are accepted");
  p.combine_partials = 0;
  p.bias = 2;
  expect_refused(uniep_needs(&p, 0, 1, &needs), "problem.bias is 2; 0 and 1 are accepted");
  p.bias = 0;
  p.backward_rows = -128;
  expect_refused(uniep_needs(&p, 0, 1, &needs),
                 cat("problem.backward_rows is -128; 0 (all), or a multiple of row_align=",
                     p.row_align, " up to 2147483647 is accepted"));
}

TEST(CApi, SharedExpertsHaveTheContractsBits) {
  for (const bool with_probs : {false, true}) {
    const LayerData data = batch_with_shared(with_probs);
    Problem problem = problem_of_batches();
    problem.shared_experts = data.shared_experts;
    const CLayer layer(problem);
    CStep whole(layer, data), parts(layer, data);
    whole.forward();
    whole.backward();
    whole.expect_contract("whole");
    parts.forward();
    parts.backward(1);
    parts.backward(2);
    parts.expect_contract("in parts");
    uniep_backward_call call = whole.backward_call();
    call.dshared_probs = nullptr;  // not wanted
    expect_ok(uniep_backward(layer.get(), &call));
    whole.expect_contract("without gradients of probabilities");
  }
}

TEST(CApi, SharedExpertsAreAskedForOrRefused) {
  const LayerData data = batch_with_shared(false);
  Problem problem = problem_of_batches();
  const CLayer without(problem);
  problem.shared_experts = data.shared_experts;
  const CLayer with(problem);
  CStep step(with, data), other(without, batch(1));
  uniep_forward_call forward = step.forward_call();
  forward.shared_w2 = nullptr;
  expect_refused(uniep_forward(with.get(), &forward),
                 "rank 0: shared_w2 is NULL; an address is accepted");
  forward = other.forward_call();
  forward.shared_w1 = data.shared_w1.data();
  expect_refused(uniep_forward(without.get(), &forward),
                 "rank 0: shared_w1 is given, and this layer has no shared experts; NULL is "
                 "accepted, or problem.shared_experts of 1 or more");
  step.forward();
  uniep_backward_call backward = step.backward_call();
  backward.dshared_w1 = nullptr;
  expect_refused(uniep_backward(with.get(), &backward),
                 "rank 0: dshared_w1 is NULL; an address is accepted");
  // Their tiles read tokens where they lie: those of data and those of weights.
  backward = step.backward_call();
  backward.x = nullptr;
  expect_refused(uniep_backward(with.get(), &backward),
                 "rank 0: x is NULL; an address is accepted");
  for (const bool over_x : {false, true}) {
    backward = step.backward_call();
    auto* const tokens = const_cast<void*>(over_x ? backward.x : backward.dy);
    backward.dx = static_cast<bf16*>(tokens) + (over_x ? 8 : 0);
    expect_refused(uniep_backward(with.get(), &backward),
                   cat("rank 0: dx shares memory with ", over_x ? "x" : "dy",
                       ", which shared experts read until the end of a backward pass; memory of "
                       "its own is accepted"));
  }
  step.backward(1);  // the rest is not collective
  for (const void* uniep_backward_call::*token :
       {&uniep_backward_call::x, &uniep_backward_call::dy}) {
    backward = step.backward_call(2);
    backward.*token = nullptr;
    const char* name = token == &uniep_backward_call::x ? "x" : "dy";
    expect_refused(uniep_backward(with.get(), &backward),
                   cat(name, " is NULL; an address is accepted"));
  }
  step.backward(2);
  step.expect_contract("behind what was refused");
}

}  // namespace
}  // namespace uniep::testing
