// What is added to what, and in which order: slots of a token, weight gradients, main gradients.
#include <gtest/gtest.h>

#include <cmath>

#include "contract/contract_testing.h"
#include "support/cases.h"
#include "support/layer_group.h"

namespace uniep::testing {
namespace {

TEST(DroppedSlots, ATokenWithoutOthersGetsZerosAndIsNotSent) {
  LayerData data = plain_layer(2);
  const auto topk = static_cast<std::size_t>(data.topk);
  const auto hidden = static_cast<std::size_t>(data.hidden);
  const auto of_token = [](auto& values, std::size_t token, std::size_t width) {
    return std::span(values).subspan(token * width, width);
  };
  for (const std::size_t token : {0, 3, 9})
    std::ranges::fill(of_token(data.topk_ids, token, topk), -1);
  data.topk_ids[4 * topk] = -1;  // beside a slot that is none
  poison_dropped_slots(data);
  const LayerData without = plain_layer(2);
  const workload::Split before(without, 2);
  for (const char* schedule : {"sequential", "single", "pipelined:2"}) {
    LayerGroup g(data, 2);
    g.make_layers();
    g.each([&](int rank) {
      // A step before in which nothing is dropped: then NaN lies in the places of those rows.
      Saved saved =
          g.layer(rank).forward(g.layer(rank).plan(before.topk_ids(rank)), g.forward_args(rank));
      g.layer(rank).backward(saved, g.backward_args(rank));
    });
    LayerResult& got = g.result();
    ASSERT_TRUE(std::isnan(to_float(got.out[0])) && std::isnan(to_float(got.dx[0])));
    g.make_plans();
    g.each([&](int rank) {
      g.forward(rank, parse_schedule(schedule));
      g.backward(rank, parse_schedule(schedule));
    });
    for (const std::size_t token : {0, 3, 9}) {
      for (const bf16 v : of_token(got.out, token, hidden)) ASSERT_EQ(v.bits, 0);
      for (const bf16 v : of_token(got.dx, token, hidden)) ASSERT_EQ(v.bits, 0);
      for (const float v : of_token(got.dprobs, token, topk)) ASSERT_EQ(v, 0);
    }
    EXPECT_EQ(got.dprobs[4 * topk], 0);
    expect_same_bits(got, reference::contract(data), schedule);
  }
  // What travels is what the others need.
  LayerGroup g(data, 2);
  g.make_layers();
  g.make_plans();
  std::int64_t rows = 0, pulls = 0;
  for (int rank = 0; rank < 2; ++rank) {
    rows += g.plan(rank).traffic().rows;
    for (const Pull& pull : g.plan(rank).pulls()) {
      pulls += 1;
      const auto token = g.split().tokens(pull.source).begin + pull.token;
      EXPECT_TRUE(token != 0 && token != 3 && token != 9) << token;
    }
  }
  EXPECT_EQ(rows, std::ranges::count_if(data.topk_ids, [](std::int32_t id) { return id >= 0; }));
  EXPECT_GT(pulls, 0);
}

TEST(SharedExperts, TwoSumsThatRoundToNegativeZeroStayIt) {
  // A row is [-2^-133, ...], the least that bf16 has, and counts a quarter.
  const bf16 zero, one = to_bf16(1.0f), least{0x8001};
  LayerData d;
  d.tokens = 2, d.hidden = d.intermediate = 8;
  d.num_experts = d.topk = 1;
  d.activation = Activation::kRelu2;
  d.probs = Probs::kAfter;
  d.shared_experts = 1;
  d.topk_ids = {0, -1};
  d.topk_probs = d.shared_probs = {0.25f, 0.25f};
  d.x.assign(16, zero), d.dy.assign(16, one);
  d.x[0] = d.x[8] = one;
  d.w1.assign(64, zero), d.w2.assign(64, zero);
  d.w1[0] = one;
  for (std::size_t h = 0; h < 8; ++h) d.w2[8 * h] = least;
  d.shared_w1 = d.w1, d.shared_w2 = d.w2;
  RunOptions o;
  o.token_begin = {0, 2};
  const LayerResult got = run_layer(d, o);
  for (std::size_t h = 0; h < 8; ++h) {
    EXPECT_EQ(got.out[h].bits, 0x8000) << "both are -0";
    EXPECT_EQ(got.out[8 + h].bits, 0) << "a token without experts has +0, to which -0 is added";
  }
  expect_same_bits(got, expected(d, o), "tiny rows");
}

TEST(MainGrad, AccumulatesOverBackwardCalls) {
  LayerGroup g(plain_layer(2), 2, true);
  g.make_layers();
  g.make_plans();
  LayerResult want;
  want.main_dw1.resize(g.data().w1.size());
  want.main_dw2.resize(g.data().w2.size());
  for (int call = 1; call <= 3; ++call) {
    g.each([&](int rank) {
      g.forward(rank, parse_schedule(call == 2 ? "sequential" : "single"));
      g.backward(rank, parse_schedule(call == 2 ? "two-kernel" : "single,tile_m=16"));
    });
    want = reference::contract_into_main_grad(g.data(), want.main_dw1, want.main_dw2);
    expect_same_bits(g.result(), want, cat("after ", call, " backward calls"));
  }
}

TEST(MainGrad, ExpertsWithoutRowsKeepEveryBit) {
  LayerData data = plain_layer(2);
  for (auto& id : data.topk_ids) id = id % 2 == 0 ? 2 : -1;  // experts 0, 1 and 3 get nothing
  LayerGroup g(data, 2, true);
  const float odd = -0.0f;  // adding +0 to it would change it
  std::ranges::fill(g.result().main_dw1, odd);
  std::ranges::fill(g.result().main_dw2, odd);
  const LayerResult want = reference::contract_into_main_grad(
      data, std::vector<float>(data.w1.size(), odd), std::vector<float>(data.w2.size(), odd));
  g.make_layers();
  g.make_plans();
  g.each([&](int rank) {
    g.forward(rank);
    g.backward(rank);
  });
  expect_same_bits(g.result(), want, "-0 in main_grad");
}

TEST(MainGrad, OneGradientInBf16AndTheOtherInFp32) {
  const LayerData data = plain_layer(2);
  LayerGroup g(data, 2);
  g.make_layers();
  g.make_plans();
  std::vector<float> main_dw2(data.w2.size());
  g.each([&](int rank) {
    g.forward(rank);
    BackwardArgs args = g.backward_args(rank);
    const std::size_t half = main_dw2.size() / 2;
    args.dw2 = std::span(main_dw2).subspan(static_cast<std::size_t>(rank) * half, half);
    g.layer(rank).backward(g.saved(rank), args);
  });
  expect_same_bits(g.result().dw1, reference::contract(data).dw1, "dw1", "bf16");
  expect_same_bits(main_dw2, expected(data, true, 0).main_dw2, "main_dw2", "fp32");
}

TEST(MainGrad, InBf16IsRoundedOnceACallAndKeptWithoutRows) {
  LayerData data = plain_layer(2);
  for (auto& id : data.topk_ids) id = id == 3 ? -1 : id;  // expert 3 gets nothing
  LayerGroup g(data, 2);
  g.make_layers();
  g.make_plans();
  const bf16 odd{0x8000};  // -0: adding +0 to it would change it
  std::ranges::fill(g.result().dw1, odd);
  std::ranges::fill(g.result().dw2, odd);
  LayerResult want = g.result();
  for (int call = 1; call <= 3; ++call) {
    g.each([&](int rank) {
      g.forward(rank);
      BackwardArgs args = g.backward_args(rank);
      args.dw1 = Bf16MainGrad{std::get<ExpertMatrices<bf16>>(args.dw1)};
      args.dw2 = Bf16MainGrad{std::get<ExpertMatrices<bf16>>(args.dw2)};
      g.layer(rank).backward(g.saved(rank), args, parse_schedule("single,tile_m=16"));
    });
    want = reference::contract_into_bf16_main_grad(data, want.dw1, want.dw2);
    expect_same_bits(g.result(), want, cat("after ", call, " backward calls"));
  }
}

TEST(WeightGrads, ExpertsWithoutRowsGetZeros) {
  LayerData data = plain_layer(2);
  std::ranges::fill(data.topk_ids, -1);
  LayerGroup g(data, 2);
  g.make_layers();
  g.expect_step_works("nothing but dropped slots");
  for (const bf16 v : g.result().dw1) ASSERT_EQ(v.bits, 0);
  for (const bf16 v : g.result().out) ASSERT_EQ(v.bits, 0);
  for (const float v : g.result().dprobs) ASSERT_EQ(v, 0.0f);
}

// So that the random cases of contract_test can tell these apart.
TEST(Reduce, CombineGroupsAreArithmetic) {
  LayerData data = plain_layer(2);
  data.topk = 3;
  data.topk_ids.clear();
  data.topk_probs.clear();
  const float large = std::ldexp(1.0f, 24);
  const int last = data.num_experts - 1;
  for (int t = 0; t < data.tokens; ++t) {
    data.topk_ids.insert(data.topk_ids.end(), {last, 0, 0});
    data.topk_probs.insert(data.topk_probs.end(), {1, large, -large});
  }
  const LayerResult one = reference::contract(data);
  data.combine_groups = 2;
  const LayerResult two = reference::contract(data);
  ASSERT_NE(two.out, one.out);
  ASSERT_NE(two.dx, one.dx);
  for (int t = 0; t < data.tokens; ++t) {  // what is added to what is rounded now
    data.topk_ids[static_cast<std::size_t>(3 * t + 1)] = last;
  }
  const LayerResult fp32 = reference::contract(data);
  data.combine_partials = CombinePartials::kBf16;
  ASSERT_NE(reference::contract(data).out, fp32.out);
  ASSERT_NE(reference::contract(data).dx, fp32.dx);
  LayerGroup g(data, 2);
  g.make_layers();
  g.expect_step_works("partial sums that are rounded");
}

// Sums of a few bf16 rows are mostly exact in fp32, in any order. Not these: the large ones cancel
// only where they are added first.
TEST(Reduce, AddsSlotsInAscendingOrder) {
  LayerData data = plain_layer(2);
  data.topk = 3;
  const auto set_slots = [&](const std::vector<float>& probs) {
    data.topk_ids.clear();
    data.topk_probs.clear();
    for (int t = 0; t < data.tokens; ++t) {
      data.topk_ids.insert(data.topk_ids.end(), 3, t % data.num_experts);
      data.topk_probs.insert(data.topk_probs.end(), probs.begin(), probs.end());
    }
  };
  const float large = std::ldexp(1.0f, 24);
  set_slots({1, -large, large});
  const LayerResult downwards = reference::contract(data);
  set_slots({large, -large, 1});
  const LayerResult want = reference::contract(data);
  ASSERT_NE(want.out, downwards.out);
  ASSERT_NE(want.dx, downwards.dx);
  LayerGroup g(data, 2);
  g.make_layers();
  g.expect_step_works("large rows that cancel");
}

TEST(WeightGrads, WhatDroppedSlotsHoldAsProbabilityIsNotRead) {
  LayerData data = plain_layer(2);
  for (std::size_t i = 0; i < data.topk_ids.size(); i += 3) data.topk_ids[i] = -1;
  LayerGroup clean(data, 2);
  clean.make_layers();
  clean.expect_step_works("clean");
  for (std::size_t i = 0; i < data.topk_ids.size(); i += 3) data.topk_probs[i] = NAN;
  LayerGroup dirty(data, 2);
  dirty.make_layers();
  dirty.make_plans();
  dirty.each([&](int rank) {
    dirty.forward(rank);
    dirty.backward(rank);
  });
  expect_same_bits(dirty.result(), clean.result(), "NaN at dropped slots");
}

}  // namespace
}  // namespace uniep::testing
