// Arguments are agreed upon before anything happens: what one rank gets wrong, all ranks refuse
// with the same words, nothing has been written, and the layer goes on working.
#include <gtest/gtest.h>

#include <limits>

#include "base/check.h"
#include "layer/arguments.h"
#include "layer/expert_places.h"
#include "plan/plan_data.h"
#include "support/expect_error.h"
#include "support/layer_group.h"
#include "support/states.h"

namespace uniep::testing {
namespace {

constexpr int kRanks = 3;

class Agreement : public ::testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    group_.make_layers();
    group_.make_plans();
  }

  void expect_refused(ErrorCode code, const std::string& sentence,
                      const std::function<void(int)>& call) {
    for (const Outcome& o : group_.attempt(call)) {
      EXPECT_STATES(o.what(), sentence);
      ASSERT_TRUE(o.error);
      EXPECT_EQ(static_cast<int>(o.error->code()), static_cast<int>(code)) << sentence;
    }
    group_.expect_untouched("after: " + sentence);
  }

  void expect_refused(const std::string& sentence, const std::function<void(int)>& call) {
    expect_refused(ErrorCode::kInvalidArgument, sentence, call);
  }

  /// Rank 1 passes forward's arguments after `spoil`.
  void expect_forward_refused(const std::string& sentence,
                              const std::function<void(ForwardArgs&)>& spoil) {
    expect_refused(sentence, [&](int rank) {
      ForwardArgs args = group_.forward_args(rank);
      if (rank == 1) spoil(args);
      group_.layer(rank).forward(group_.plan(rank), args);
    });
  }

  void expect_backward_refused(const std::string& sentence,
                               const std::function<void(BackwardArgs&)>& spoil) {
    expect_refused(sentence, [&](int rank) {
      BackwardArgs args = group_.backward_args(rank);
      if (rank == 1) spoil(args);
      group_.layer(rank).backward(group_.saved(rank), args);
    });
  }

  void expect_backward_data_refused(const std::string& sentence,
                                    const std::function<void(BackwardDataArgs&)>& spoil) {
    expect_refused(sentence, [&](int rank) {
      BackwardDataArgs args = data_args(group_.backward_args(rank));
      if (rank == 1) spoil(args);
      group_.layer(rank).backward_data(group_.saved(rank), args);
    });
  }

  LayerGroup group_{plain_layer(kRanks), kRanks, GetParam()};
};

INSTANTIATE_TEST_SUITE_P(WeightGrads, Agreement, ::testing::Bool(),
                         [](const auto& test) { return test.param ? "Fp32" : "Bf16"; });

template <class T>
void drop_last(std::span<T>& tensor) {
  tensor = tensor.first(tensor.size() - 1);
}

template <class T>
void drop_last(ExpertMatrices<T>& matrices) {
  matrices = matrices.tensor().first(matrices.size() - 1);
}

void drop_last(Bf16MainGrad& grad) { drop_last(grad.values); }

void drop_last(WeightGrad& grad) {
  std::visit([](auto& matrices) { drop_last(matrices); }, grad);
}

template <class T>
void begin_where(ExpertMatrices<T>& matrices, const ExpertMatrices<T>& others) {
  matrices = others.tensor().first(matrices.size());
}

void begin_where(Bf16MainGrad& grad, const Bf16MainGrad& other) {
  begin_where(grad.values, other.values);
}

std::string wrong_size(const char* tensor, std::size_t size, const char* shape) {
  return cat("rank 1: ", tensor, " has ", size - 1, " elements; ", shape, " needs ", size);
}

TEST_P(Agreement, WrongSizesInForward) {
  const ForwardArgs good = group_.forward_args(1);
  expect_forward_refused(wrong_size("x", good.x.size(), "[T, H]"),
                         [](ForwardArgs& a) { drop_last(a.x); });
  expect_forward_refused(wrong_size("topk_probs", good.topk_probs.size(), "[T, K]"),
                         [](ForwardArgs& a) { drop_last(a.topk_probs); });
  expect_forward_refused(wrong_size("w1", good.w1.size(), "[E / ranks, 2I, H]"),
                         [](ForwardArgs& a) { drop_last(a.w1); });
  expect_forward_refused(wrong_size("w2", good.w2.size(), "[E / ranks, H, I]"),
                         [](ForwardArgs& a) { drop_last(a.w2); });
  expect_forward_refused(wrong_size("out", good.out.size(), "[T, H]"),
                         [](ForwardArgs& a) { drop_last(a.out); });
  group_.expect_step_works("after refusals");
}

TEST_P(Agreement, WrongFormsOfWeights) {
  const std::span<const bf16> w1 = group_.forward_args(1).w1.tensor();
  const std::span<const bf16> w2 = group_.forward_args(1).w2.tensor();
  using Weights = ExpertMatrices<const bf16>;
  const auto half = w1.size() / 2;
  expect_forward_refused(
      cat("rank 1: w1's up has ", half - 1, " elements; [E / ranks, I, H] needs ", half),
      [&](ForwardArgs& a) { a.w1 = Weights::gate_and_up(w1.first(half), w1.subspan(half + 1)); });
  expect_forward_refused(
      "rank 1: w2 is given as rows of gate and up by turns, which it does not have; one tensor is "
      "accepted, or one for each expert",
      [&](ForwardArgs& a) { a.w2 = Weights::interleaved(w2); });
  const std::size_t experts = group_.split().problem().num_experts / kRanks;
  std::vector<std::span<const bf16>> each(experts, w1.first(w1.size() / experts));
  each.push_back(each[0]);
  expect_forward_refused(cat("rank 1: w1 has ", experts + 1, " tensors; one for each of ", experts,
                             " experts of the rank is accepted"),
                         [&](ForwardArgs& a) { a.w1 = Weights::one_each(each); });
  each.pop_back();
  each[0] = each[0].first(3);
  expect_forward_refused(
      cat("rank 1: w1[0] has 3 elements; the matrix of an expert needs ", w1.size() / experts),
      [&](ForwardArgs& a) { a.w1 = Weights::one_each(each); });
  group_.expect_step_works("after refusals");
}

TEST_P(Agreement, WrongSizesInBackward) {
  group_.each([&](int rank) { group_.forward(rank); });
  group_.clear_result();
  const BackwardArgs good = group_.backward_args(1);
  const auto grad_size = [](const WeightGrad& g) {
    return with_matrices(g, [](const auto& matrices) { return matrices.size(); });
  };
  expect_backward_refused(wrong_size("dy", good.dy.size(), "[T, H]"),
                          [](BackwardArgs& a) { drop_last(a.dy); });
  expect_backward_refused(wrong_size("w1", good.w1.size(), "[E / ranks, 2I, H]"),
                          [](BackwardArgs& a) { drop_last(a.w1); });
  expect_backward_refused(wrong_size("w2", good.w2.size(), "[E / ranks, H, I]"),
                          [](BackwardArgs& a) { drop_last(a.w2); });
  expect_backward_refused(wrong_size("dx", good.dx.size(), "[T, H]"),
                          [](BackwardArgs& a) { drop_last(a.dx); });
  expect_backward_refused(wrong_size("dprobs", good.dprobs.size(), "[T, K]"),
                          [](BackwardArgs& a) { drop_last(a.dprobs); });
  expect_backward_refused(wrong_size("dw1", grad_size(good.dw1), "[E / ranks, 2I, H]"),
                          [](BackwardArgs& a) { drop_last(a.dw1); });
  expect_backward_refused(wrong_size("dw2", grad_size(good.dw2), "[E / ranks, H, I]"),
                          [](BackwardArgs& a) { drop_last(a.dw2); });
  group_.expect_step_works("after refusals");
}

TEST_P(Agreement, TensorsWithoutAnAddress) {
  const ForwardArgs good = group_.forward_args(1);
  const std::string elements = " elements at address 0; an address is accepted";
  expect_forward_refused(cat("rank 1: x has ", good.x.size(), elements), [](ForwardArgs& a) {
    a.x = {static_cast<const bf16*>(nullptr), a.x.size()};
  });
  expect_forward_refused(cat("rank 1: w2 has ", good.w2.size(), elements), [](ForwardArgs& a) {
    a.w2 = std::span(static_cast<const bf16*>(nullptr), a.w2.size());
  });
  group_.expect_step_works("after refusals");
}

/// Reduce reads probabilities where the caller has them, after it has written other tokens'
/// results.
TEST(AgreementOfProbs, ResultsInTheMemoryOfProbabilitiesBehindFc2) {
  LayerData data = plain_layer(kRanks);
  data.probs = Probs::kAfter;
  LayerGroup group(data, kRanks);
  group.make_layers();
  group.make_plans();
  for (const Outcome& outcome : group.attempt([&](int rank) {
         ForwardArgs args = group.forward_args(rank);
         if (rank == 1) {
           auto* const probs = const_cast<float*>(args.topk_probs.data());
           args.out = {reinterpret_cast<bf16*>(probs), args.out.size()};
         }
         group.layer(rank).forward(group.plan(rank), args);
       })) {
    EXPECT_STATES(outcome.what(),
                  "rank 1: out shares memory with topk_probs; memory of its own is accepted");
  }
  group.expect_step_works("after a refusal");
}

/// Where `tensor` begins.
std::span<bf16> in_place_of(const ExpertMatrices<const bf16>& tensor, std::size_t size) {
  return {const_cast<bf16*>(tensor.data()), size};
}

TEST_P(Agreement, ResultsInTheMemoryOfOtherTensors) {
  expect_forward_refused("rank 1: out shares memory with w1; memory of its own is accepted",
                         [](ForwardArgs& a) { a.out = in_place_of(a.w1, a.out.size()); });
  group_.each([&](int rank) { group_.forward(rank); });
  group_.clear_result();
  expect_backward_refused("rank 1: dx shares memory with w2; memory of its own is accepted",
                          [](BackwardArgs& a) { a.dx = in_place_of(a.w2, a.dx.size()); });
  expect_backward_refused("rank 1: dw2 shares memory with dw1; memory of its own is accepted",
                          [](BackwardArgs& a) {
                            std::visit(
                                [&](auto& dw2) {
                                  using Kind = std::remove_cvref_t<decltype(dw2)>;
                                  begin_where(dw2, std::get<Kind>(a.dw1));
                                },
                                a.dw2);
                          });
  group_.expect_step_works("after refusals");
}

/// What an earlier call has left is not lost.
TEST_P(Agreement, WrongSizesInBackwardData) {
  group_.each([&](int rank) {
    group_.forward(rank);
    group_.layer(rank).backward_data(group_.saved(rank), data_args(group_.backward_args(rank)));
  });
  const LayerResult before = group_.result();
  group_.clear_result();
  const BackwardArgs good = group_.backward_args(1);
  expect_backward_data_refused(wrong_size("dy", good.dy.size(), "[T, H]"),
                               [](BackwardDataArgs& a) { drop_last(a.dy); });
  expect_backward_data_refused(wrong_size("w1", good.w1.size(), "[E / ranks, 2I, H]"),
                               [](BackwardDataArgs& a) { drop_last(a.w1); });
  expect_backward_data_refused(wrong_size("w2", good.w2.size(), "[E / ranks, H, I]"),
                               [](BackwardDataArgs& a) { drop_last(a.w2); });
  expect_backward_data_refused(wrong_size("dx", good.dx.size(), "[T, H]"),
                               [](BackwardDataArgs& a) { drop_last(a.dx); });
  expect_backward_data_refused(wrong_size("dprobs", good.dprobs.size(), "[T, K]"),
                               [](BackwardDataArgs& a) { drop_last(a.dprobs); });
  group_.result() = before;
  group_.each([&](int rank) {
    group_.layer(rank).backward_weights(group_.saved(rank),
                                        weights_args(group_.backward_args(rank)));
  });
  group_.expect_contract("after refusals");
}

TEST_P(Agreement, WrongRouting) {
  std::vector<std::int32_t> ids(group_.split().topk_ids(1).begin(),
                                group_.split().topk_ids(1).end());
  const auto plan_with = [&](const std::vector<std::int32_t>& of_rank_1) {
    return [&](int rank) {
      group_.layer(rank).plan(rank == 1 ? std::span<const std::int32_t>(of_rank_1)
                                        : group_.split().topk_ids(rank));
    };
  };
  std::vector<std::int32_t> bad = ids;
  bad[5] = 6;
  expect_refused("topk_ids of rank 1, token 2, slot 1 is 6; -1 (dropped) to 5 is accepted",
                 plan_with(bad));
  bad[5] = -2;
  expect_refused("topk_ids of rank 1, token 2, slot 1 is -2; -1 (dropped) to 5 is accepted",
                 plan_with(bad));
  bad = ids;
  bad.pop_back();
  expect_refused("rank 1: topk_ids has 23 elements; a multiple of topk=2 is accepted",
                 plan_with(bad));
  bad = ids;
  bad.push_back(0);
  bad.push_back(0);
  expect_refused("rank 1: topk_ids holds 13 tokens; at most max_tokens=12 is accepted",
                 plan_with(bad));
  group_.expect_step_works("after refusals");
}

TEST_P(Agreement, TheLowestRankIsHeardWhereSeveralAreWrong) {
  expect_refused(wrong_size("x", group_.forward_args(1).x.size(), "[T, H]"), [&](int rank) {
    ForwardArgs args = group_.forward_args(rank);
    if (rank == 1) drop_last(args.x);
    if (rank == 2) drop_last(args.w1);
    group_.layer(rank).forward(group_.plan(rank), args);
  });
  group_.expect_step_works("after a refusal");
}

/// What a pass of the group's layers, its communicator's first, is called.
std::string call_text(const char* pass, const RoutingPlan& plan, const Schedule& schedule = {}) {
  return cat(pass, " of layer 1, plan ", std::hex, plan.data().fingerprint, " with schedule ",
             to_string(schedule));
}

TEST_P(Agreement, SchedulesThatDiffer) {
  Schedule other;
  other.tile_n = 64;
  expect_refused(
      cat("ranks disagree: rank 0 calls ", call_text("forward", group_.plan(0)), "; rank 2 calls ",
          call_text("forward", group_.plan(0), other), "; the same call on every rank is accepted"),
      [&](int rank) {
        group_.layer(rank).forward(group_.plan(rank), group_.forward_args(rank),
                                   rank == 2 ? other : Schedule{});
      });
  group_.expect_step_works("after a refusal");
}

TEST_P(Agreement, ASchedulesThatCannotRun) {
  for (const auto& [field, sentence] : std::initializer_list<std::pair<int, const char*>>{
           {0, "schedule axis launch is 9; separate, pipelined, paired, single, waves is accepted"},
           {1,
            "launch=pipelined needs at least 2 waves, for there is nothing to overlap in one"}}) {
    Schedule bad;
    bad.launch = field == 0 ? static_cast<LaunchGrouping>(9) : LaunchGrouping::kPipelined;
    expect_refused(cat("rank 0: schedule cannot run: ", sentence), [&](int rank) {
      group_.layer(rank).forward(group_.plan(rank), group_.forward_args(rank), bad);
    });
  }
  group_.expect_step_works("after refusals");
}

TEST_P(Agreement, CallsThatDiffer) {
  const std::string forward = call_text("forward", group_.plan(0));
  expect_refused(cat("ranks disagree: rank 0 calls ", forward,
                     "; rank 1 calls plan of layer 1; the same call on every rank is accepted"),
                 [&](int rank) {
                   if (rank == 1) {
                     group_.layer(rank).plan(group_.split().topk_ids(rank));
                   } else {
                     group_.layer(rank).forward(group_.plan(rank), group_.forward_args(rank));
                   }
                 });
  group_.each([&](int rank) { group_.forward(rank); });
  group_.clear_result();
  const std::string backward = call_text("backward", group_.plan(0));
  expect_refused(cat("ranks disagree: rank 0 calls ", forward, "; rank 2 calls ", backward,
                     "; the same call on every rank is accepted"),
                 [&](int rank) {
                   if (rank == 2) {
                     group_.backward(rank);
                   } else {
                     group_.layer(rank).forward(group_.plan(rank), group_.forward_args(rank));
                   }
                 });
  group_.expect_step_works("after refusals");
}

TEST_P(Agreement, BatchesThatDiffer) {
  std::vector<std::optional<RoutingPlan>> other(kRanks);
  group_.each([&](int rank) {
    auto ids = group_.split().topk_ids(rank);
    std::vector<std::int32_t> reversed(ids.rbegin(), ids.rend());
    other[static_cast<std::size_t>(rank)] = group_.layer(rank).plan(reversed);
  });
  expect_refused(
      cat("ranks disagree: rank 0 calls ", call_text("forward", group_.plan(0)), "; rank 1 calls ",
          call_text("forward", *other[1]), "; the same call on every rank is accepted"),
      [&](int rank) {
        group_.layer(rank).forward(
            rank == 1 ? *other[static_cast<std::size_t>(rank)] : group_.plan(rank),
            group_.forward_args(rank));
      });
  group_.expect_step_works("after a refusal");
}

TEST_P(Agreement, LayersThatDiffer) {
  std::vector<std::optional<Layer>> second(kRanks);
  group_.each([&](int rank) {
    const auto r = static_cast<std::size_t>(rank);
    second[r].emplace(group_.split().problem(), group_.group()[r]);
  });
  expect_refused(
      "ranks disagree: rank 0 calls plan of layer 1; rank 1 calls plan of layer 2; the same call "
      "on every rank is accepted",
      [&](int rank) {
        Layer& layer = rank == 1 ? *second[1] : group_.layer(rank);
        layer.plan(group_.split().topk_ids(rank));
      });
  group_.expect_step_works("after a refusal");
}

TEST_P(Agreement, APlanOfAnotherRankOrProblem) {
  expect_refused(
      "rank 1: plan is that of rank 0 of 3; the plan of rank 1 of 3 is accepted", [&](int rank) {
        group_.layer(rank).forward(group_.plan(rank == 1 ? 0 : rank), group_.forward_args(rank));
      });
  Problem other = group_.split().problem();
  other.row_align = 64;
  const std::vector<std::int64_t> tokens(kRanks, 12);
  const RoutingPlan plan = RoutingPlan::build(other, 1, tokens, group_.data().topk_ids);
  expect_refused(cat("rank 1: plan was made for ", to_string(other), "; a plan for ",
                     to_string(group_.split().problem()), " is accepted"),
                 [&](int rank) {
                   group_.layer(rank).forward(rank == 1 ? plan : group_.plan(rank),
                                              group_.forward_args(rank));
                 });
  group_.expect_step_works("after refusals");
}

TEST_P(Agreement, AnEmptySaved) {
  group_.each([&](int rank) { group_.forward(rank); });
  group_.clear_result();
  const Saved empty;
  expect_refused("rank 1: saved is empty; what forward returned is accepted", [&](int rank) {
    group_.layer(rank).backward(rank == 1 ? empty : group_.saved(rank), group_.backward_args(rank));
  });
  expect_refused("rank 1: saved is empty; what forward returned is accepted", [&](int rank) {
    Saved none;
    group_.layer(rank).backward_data(rank == 1 ? none : group_.saved(rank),
                                     data_args(group_.backward_args(rank)));
  });
  group_.expect_step_works("after a refusal");
}

TEST(LayerAgreement, ProblemsThatDiffer) {
  LayerGroup group(plain_layer(2), 2);
  const Problem problem = group.split().problem();
  Problem other = problem;
  other.topk = 3;
  const auto outcomes = group.attempt([&](int rank) {
    const Layer layer(rank == 1 ? other : problem, group.group()[static_cast<std::size_t>(rank)]);
  });
  for (const Outcome& o : outcomes) {
    EXPECT_STATES(o.what(), cat("ranks disagree: rank 0 calls layer ", to_string(problem),
                                "; rank 1 calls layer ", to_string(other),
                                "; the same call on every rank is accepted"));
  }
  group.make_layers();
  group.expect_step_works("on a communicator that has seen a refusal");
}

TEST(LayerAgreement, AProblemThatIsInvalid) {
  LayerGroup group(plain_layer(2), 2);
  Problem bad = group.split().problem();
  bad.hidden = 12;
  const auto outcomes = group.attempt(
      [&](int rank) { const Layer layer(bad, group.group()[static_cast<std::size_t>(rank)]); });
  for (const Outcome& o : outcomes) {
    EXPECT_STATES(o.what(),
                  "rank 0: problem.hidden is 12; a multiple of 8 from 8 to 1048576 is accepted");
  }
}

TEST(LayerAgreement, ACapacityThatIsTooSmallIsRefusedAndANewLayerWorks) {
  LayerGroup group(plain_layer(2), 2);
  Problem small = group.split().problem();
  small.capacity_rows = 128;
  const auto outcomes = group.attempt([&](int rank) {
    Layer layer(small, group.group()[static_cast<std::size_t>(rank)]);
    layer.plan(group.split().topk_ids(rank));
  });
  for (const Outcome& o : outcomes) {
    EXPECT_STATES(o.what(),
                  "rank 0 would receive 256 rows (padding included), but capacity_rows is 128; "
                  "capacity_rows=256 would do for this routing");
    ASSERT_TRUE(o.error);
    EXPECT_EQ(static_cast<int>(o.error->code()), static_cast<int>(ErrorCode::kCapacity));
  }
  group.make_layers();
  group.expect_step_works("after a refusal");
}

/// Later calls on the same layer, and what earlier ones added to main_grad, do not suffer.
TEST(LayerAgreement, AnOverflowWritesNothingAndTheLayerWorksOn) {
  LayerGroup group(plain_layer(2), 2, true);
  Problem problem = group.split().problem();
  problem.row_align = 16;
  problem.capacity_rows = 32;  // of 12 rows an expert, padded
  const Schedule schedule = parse_schedule("single,tile_m=16");
  std::vector<std::optional<Layer>> layers(2);
  const auto step = [&](int rank) {
    Layer& layer = *layers[static_cast<std::size_t>(rank)];
    const RoutingPlan plan = layer.plan(group.split().topk_ids(rank));
    const Saved saved = layer.forward(plan, group.forward_args(rank), schedule);
    layer.backward(saved, group.backward_args(rank), schedule);
  };
  group.each([&](int rank) {
    const auto r = static_cast<std::size_t>(rank);
    layers[r].emplace(problem, group.group()[r]);
    step(rank);
  });
  const LayerResult before = group.result();
  const std::vector<std::int32_t> all_to_one(24, 0);
  const auto outcomes =
      group.attempt([&](int rank) { layers[static_cast<std::size_t>(rank)]->plan(all_to_one); });
  for (const Outcome& o : outcomes) {
    EXPECT_STATES(o.what(),
                  "rank 0 would receive 48 rows (padding included), but capacity_rows is 32; "
                  "capacity_rows=48 would do for this routing");
  }
  expect_same_bits(group.result(), before, "after an overflow");
  group.clear_result();
  group.each(step);
  group.expect_contract("the step after an overflow");
}

TEST(LayerAgreement, ATimeLimitOutOfRangeOnOneRankIsRefusedByAll) {
  LayerGroup group(plain_layer(2), 2);
  for (const int limit_ms : {-1, 3000001, std::numeric_limits<int>::max()}) {
    const auto outcomes = group.attempt([&](int rank) {
      const Layer layer(group.split().problem(), group.group()[static_cast<std::size_t>(rank)],
                        {.timeout_ms = rank == 1 ? limit_ms : 0});
    });
    for (const Outcome& o : outcomes) {
      EXPECT_STATES(o.what(), cat("rank 1: options.timeout_ms is ", limit_ms,
                                  "; 1 to 3000000 is accepted, and 0 for UNIEP_TIMEOUT_MS"));
      ASSERT_TRUE(o.error);
      EXPECT_EQ(static_cast<int>(o.error->code()), static_cast<int>(ErrorCode::kInvalidArgument));
    }
  }
  group.make_layers([](int) { return LayerOptions{.timeout_ms = 3000000}; });
  group.expect_step_works("under the longest limit");
}

// Two workspaces of 64 TiB do not fit an address space of 128 TiB, but the first may.
TEST(LayerAgreement, MemoryThatOneRankCannotGetIsRefusedByAll) {
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "sanitizers have address spaces of their own";
#endif
  LayerGroup group(plain_layer(2), 2);
  const Problem huge{.hidden = 1 << 18,
                     .intermediate = 8,
                     .num_experts = 2,
                     .topk = 1,
                     .max_tokens = 1 << 26,
                     .capacity_rows = 1};
  const auto outcomes = group.attempt([&](int rank) {
    const Layer layer(huge, group.group()[static_cast<std::size_t>(rank)], {.timeout_ms = 2000});
  });
  EXPECT_EQ(outcomes[0].what(), outcomes[1].what());
  for (const Outcome& o : outcomes) {
    ASSERT_TRUE(o.error);
    EXPECT_EQ(static_cast<int>(o.error->code()), static_cast<int>(ErrorCode::kCapacity));
    EXPECT_NE(o.what().find("bytes; a smaller max_tokens or capacity_rows"), std::string::npos)
        << o.what();
  }
  group.make_layers();
  group.expect_step_works("after a refusal");
}

TEST(PlansOfOtherHosts, AreRefused) {
  LayerGroup g(plain_layer(2), 2);
  g.make_layers();
  g.make_plans();
  run_ranks(Communicator::cpu_group(2, 2), [&](Communicator& c) {
    Layer layer(g.split().problem(), c);
    expect_invalid(
        "rank 0: plan was made for ranks on 1 hosts; a plan for 2, as the group's are, is accepted",
        [&] { layer.forward(g.plan(c.rank()), g.forward_args(c.rank())); });
  });
}

}  // namespace
}  // namespace uniep::testing
