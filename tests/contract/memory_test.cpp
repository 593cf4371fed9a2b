// The caller's memory: the bits are those of uniep's own, one workspace serves several steps, and
// what is too small, misaligned or not what it should be is refused with a sentence.
#include <gtest/gtest.h>

#include <cmath>

#include "contract/contract_testing.h"
#include "support/expect_error.h"
#include "support/guarded_memory.h"
#include "support/layer_group.h"

namespace uniep::testing {
namespace {

constexpr int kRanks = 2;

MemoryNeeds needs_of(const Problem& problem, int ranks = kRanks) {
  return Layer::memory_needs(problem, Backend::kCpu, ranks);
}

/// The plain layer with other inputs and routing.
LayerData batch(int number) {
  LayerData d = plain_layer(kRanks);
  Rng rng(static_cast<unsigned>(number));
  d.x = random_bf16(rng, d.tokens * d.hidden, 1);
  d.dy = random_bf16(rng, d.tokens * d.hidden, 1);
  for (auto& id : d.topk_ids) id = static_cast<std::int32_t>(pick(rng, -1, d.num_experts - 1));
  return d;
}

TEST(CallersMemory, OneWorkspaceServesSeveralOutstandingSteps) {
  const LayerData data[] = {batch(1), batch(2), batch(3)};
  const workload::Split splits[] = {{data[0], kRanks}, {data[1], kRanks}, {data[2], kRanks}};
  LayerResult results[3];
  for (int i = 0; i < 3; ++i) results[i] = workload::make_result(data[i], {});
  const Problem problem = splits[0].problem();
  const CallersGroupMemory callers(true, problem, kRanks);
  run_ranks(Communicator::cpu_group(kRanks), [&](Communicator& c) {
    Layer layer(problem, c, {.memory = callers.of_rank(c.rank())});
    std::vector<GuardedStep> kept;
    for (int i = 0; i < 3; ++i) {
      kept.emplace_back(needs_of(problem), problem);
      const StepMemory memory = kept.back().memory();
      (void)layer.forward(layer.plan(splits[i].topk_ids(c.rank()), {.memory = memory}),
                          splits[i].forward_args(c.rank(), results[i]), {.memory = memory});
    }
    for (GuardedStep& step : kept) step.move();
    for (const int i : {1, 2, 0}) {
      const GuardedStep& step = kept[static_cast<std::size_t>(i)];
      layer.backward(layer.restore(step.saved(), splits[i].tokens(c.rank()).size()),
                     splits[i].backward_args(c.rank(), results[i]), {.memory = step.memory()});
    }
  });
  for (int i = 0; i < 3; ++i) {
    expect_same_bits(results[i], reference::contract(data[i]), cat("step ", i));
  }
}

/// Saved in the caller's memory holds none of uniep's.
TEST(CallersMemory, IsNotCountedAsUnieps) {
  LayerGroup g(plain_layer(1), 1);
  g.make_layers();
  const Problem& problem = g.layer(0).problem();
  const GuardedStep step(needs_of(problem, 1), problem);
  const RoutingPlan plan = g.layer(0).plan(g.split().topk_ids(0));
  Saved own = g.layer(0).forward(plan, g.forward_args(0));
  Saved callers = g.layer(0).forward(plan, g.forward_args(0), {.memory = step.memory()});
  EXPECT_GT(own.bytes(), 0u);
  EXPECT_EQ(callers.bytes(), 0u);
  g.layer(0).backward_data(callers, data_args(g.backward_args(0)), {.memory = step.memory()});
  EXPECT_EQ(callers.bytes(), 0u);
  g.layer(0).backward_weights(callers, weights_args(g.backward_args(0)));
  g.expect_contract("plan of uniep's, rows of the caller's");
}

TEST(CallersMemory, IsReleasedOnceWhenTheLayerEnds) {
  const Problem problem = workload::Split(plain_layer(1), 1).problem();
  const Communicator alone = Communicator::cpu_group(1)[0];
  const GuardedMemory symmetric(needs_of(problem, 1).symmetric);
  int released = 0;
  LayerOptions options{.memory = {.symmetric = symmetric.bytes(), .release = [&] { ++released; }}};
  {
    Layer layer(problem, alone, options);
    Layer moved = std::move(layer);
    EXPECT_EQ(released, 0);
  }
  EXPECT_EQ(released, 1);
  options.schedule = parse_schedule("single");
  options.schedule->tile_m = 256;  // row_align is 128
  EXPECT_THROW(Layer(problem, alone, options), Error);
  EXPECT_EQ(released, 1) << "of a layer that could not be made";
}

// ---- What is refused

class RefusedMemory : public ::testing::Test {
 protected:
  std::string refused(const LayerMemory& memory) const {
    return refusal([&] { Layer(problem_, alone_, {.memory = memory}); });
  }
  template <class Call>
  static std::string refusal(const Call& call) {
    try {
      call();
    } catch (const Error& e) {
      return e.what();
    }
    return "nothing";
  }
  static std::string at(const void* address) {
    return std::to_string(reinterpret_cast<std::uintptr_t>(address));
  }

  const LayerData data_ = plain_layer(1);
  const workload::Split split_{data_, 1};
  const Problem problem_ = split_.problem();
  const Communicator alone_ = Communicator::cpu_group(1)[0];
  const MemoryNeeds needs_ = needs_of(problem_, 1);
};

TEST_F(RefusedMemory, OfALayer) {
  const GuardedMemory workspace(needs_.workspace + 64), symmetric(needs_.symmetric + 64);
  EXPECT_STATES(refused({.workspace = workspace.bytes().first(100)}),
                cat("rank 0: memory.workspace has 100 bytes; ", needs_.workspace,
                    " or more are accepted (Layer::memory_needs)"));
  EXPECT_STATES(refused({.workspace = workspace.bytes().subspan(32)}),
                cat("rank 0: memory.workspace starts at address ", at(workspace.data() + 32),
                    "; a multiple of 64 is accepted"));
  EXPECT_STATES(refused({.symmetric = symmetric.bytes().first(100)}),
                cat("rank 0: memory.symmetric has 100 bytes; ", needs_.symmetric,
                    " or more are accepted (Layer::memory_needs)"));
  EXPECT_STATES(refused({.symmetric = symmetric.bytes().subspan(8)}),
                cat("rank 0: memory.symmetric starts at address ", at(symmetric.data() + 8),
                    "; a multiple of 64 is accepted"));
  EXPECT_STATES(
      refused({.peers = {symmetric.data()}}),
      "rank 0: memory.peers is given without memory.symmetric; both or neither are accepted");
  EXPECT_STATES(refused({.release = [] {}}),
                "rank 0: memory.release is given without memory.symmetric; both or neither are "
                "accepted");
  EXPECT_STATES(
      refused({.symmetric = symmetric.bytes(), .peers = {symmetric.data(), nullptr}}),
      "rank 0: memory.peers has 2 elements; one for each of 1 ranks is accepted, or none");
  EXPECT_STATES(refused({.symmetric = symmetric.bytes(), .peers = {nullptr}}),
                "rank 0: memory.peers[0] is address 0; a multiple of 64 above 0 is accepted");
  const GuardedMemory other(needs_.symmetric);
  EXPECT_STATES(refused({.symmetric = symmetric.bytes(), .peers = {other.data()}}),
                "rank 0: memory.peers[0] is not memory.symmetric, which is accepted there as this "
                "rank's");
  const GuardedMemory both(needs_.workspace + needs_.symmetric);
  const auto symmetric_at = [&](std::int64_t begin) {
    return refused({.workspace = both.bytes(),
                    .symmetric = both.bytes().subspan(static_cast<std::size_t>(begin))});
  };
  const char* shared =
      "rank 0: memory.workspace shares memory with memory.symmetric; memory of its own is accepted";
  EXPECT_STATES(symmetric_at(0), shared);
  EXPECT_STATES(symmetric_at(needs_.workspace), "nothing") << "more than is needed is not used";
}

TEST_F(RefusedMemory, OfRanksThatCannotMapIt) {
  const Problem problem = workload::Split(plain_layer(kRanks), kRanks).problem();
  const CallersGroupMemory callers(true, problem, kRanks);
  std::string said[kRanks];
  run_ranks(Communicator::cpu_group(kRanks), [&](Communicator& c) {
    LayerMemory memory = callers.of_rank(c.rank());
    memory.peers.clear();
    said[c.rank()] = refusal([&] { Layer(problem, c, {.memory = memory}); });
  });
  for (const std::string& sentence : said) {
    EXPECT_STATES(
        sentence,
        "rank 0: memory.symmetric is given without memory.peers, and ranks on the CPU cannot "
        "map each other's; with the peers it is accepted, or none, and in a group of one");
  }
  run_ranks(Communicator::cpu_group(kRanks), [&](Communicator& c) {
    LayerMemory memory = callers.of_rank(c.rank());
    memory.peers[kRanks - 1] = memory.peers[0];
    said[c.rank()] = refusal([&] { Layer(problem, c, {.memory = memory}); });
  });
  const std::string shared = cat("rank 0: memory.peers[", kRanks - 1,
                                 "] shares memory with that of rank 0; memory of its own for each "
                                 "rank is accepted");
  for (const std::string& sentence : said) EXPECT_STATES(sentence, shared);
  run_ranks(Communicator::cpu_group(kRanks), [&](Communicator& c) {
    LayerMemory memory = callers.of_rank(c.rank());
    memory.peers[kRanks - 1] = memory.peers[0] + 64;
    said[c.rank()] = refusal([&] { Layer(problem, c, {.memory = memory}); });
  });
  for (const std::string& sentence : said) EXPECT_STATES(sentence, shared);
  run_ranks(Communicator::cpu_group(kRanks), [&](Communicator& c) {
    LayerMemory memory = callers.of_rank(c.rank());
    if (c.rank() == 1) memory = {};
    said[c.rank()] = refusal([&] { Layer(problem, c, {.memory = memory}); });
  });
  for (const std::string& sentence : said) {
    EXPECT_STATES(sentence, cat("ranks disagree: rank 0 calls layer ", to_string(problem),
                                " with memory.peers; rank 1 calls layer ", to_string(problem),
                                "; the same call on every rank is accepted"));
  }
}

TEST_F(RefusedMemory, OfAStep) {
  Layer layer(problem_, alone_);
  LayerResult result = workload::make_result(data_, {});
  const auto ids = split_.topk_ids(0);
  const GuardedStep kept(needs_, problem_);
  StepMemory m;
  const auto plan_refused = [&] { return refusal([&] { layer.plan(ids, {.memory = m}); }); };
  m.plan = kept.plan.bytes().first(64);
  EXPECT_STATES(plan_refused(), cat("rank 0: memory.plan has 64 bytes; ", needs_.plan,
                                    " or more are accepted (Layer::memory_needs)"));
  const RoutingPlan plan = layer.plan(ids);
  const auto forward_refused = [&] {
    return refusal([&] { layer.forward(plan, split_.forward_args(0, result), {.memory = m}); });
  };
  m = {.x_rows = kept.x_rows.as<bf16>(), .row_probs = kept.row_probs.as<float>()};
  EXPECT_STATES(forward_refused(),
                cat("rank 0: memory.h has 0 elements; ", needs_.rows * 2 * problem_.intermediate,
                    " or more are accepted (Layer::memory_needs)"));
  m = kept.memory();
  m.row_probs = m.row_probs.subspan(1);
  EXPECT_STATES(forward_refused(), cat("rank 0: memory.row_probs has ", needs_.rows - 1,
                                       " elements; a multiple of row_align=", problem_.row_align,
                                       " is accepted, or ", needs_.rows, " or more"));
  m = kept.memory();
  m.row_probs = m.row_probs.first(static_cast<std::size_t>(plan.padded_rows() - 128));
  EXPECT_STATES(forward_refused(),
                cat("rank 0: memory.row_probs has ", plan.padded_rows() - 128,
                    " elements; this routing brings ", plan.padded_rows(),
                    " rows (RoutingPlan::padded_rows), and as many or more are accepted"));
  m = kept.memory();
  m.forward_memory = m.forward_memory.first(64);
  EXPECT_STATES(forward_refused(),
                cat("rank 0: memory.forward_memory has 64 bytes; ", needs_.forward_memory,
                    " or more are accepted (Layer::memory_needs)"));
  Saved saved = layer.forward(plan, split_.forward_args(0, result));
  m.backward_memory = kept.backward_memory.bytes().first(64);
  // As many rows as uniep has saved.
  const std::int64_t needed =
      Layer::memory_needs(problem_, Backend::kCpu, 1, plan.padded_rows()).backward_memory;
  EXPECT_LT(needed, needs_.backward_memory);
  EXPECT_STATES(refusal([&] {
                  layer.backward_data(saved, data_args(split_.backward_args(0, result)),
                                      {.memory = m});
                }),
                cat("rank 0: memory.backward_memory has 64 bytes; ", needed,
                    " or more are accepted (Layer::memory_needs)"));
  for (const bf16 v : result.dx) ASSERT_EQ(v.bits, 0x7fff) << "nothing was written";
}

TEST_F(RefusedMemory, OfAStepThatSharesBytesOnAllRanks) {
  LayerGroup group(plain_layer(kRanks), kRanks);
  group.make_layers();
  group.make_plans();
  const Problem& problem = group.layer(0).problem();
  std::string said[kRanks];
  const auto expect_all_said = [&](const char* sentence) {
    for (const std::string& one : said) EXPECT_STATES(one, sentence);
  };
  group.each([&](int rank) {
    const GuardedStep step(needs_of(problem), problem);
    StepMemory memory = step.memory();
    if (rank == 1)
      memory.row_probs = step.forward_memory.as<float>().first(memory.row_probs.size());
    said[rank] = refusal([&] {
      group.layer(rank).forward(group.plan(rank), group.forward_args(rank), {.memory = memory});
    });
  });
  expect_all_said(
      "rank 1: memory.forward_memory shares memory with memory.row_probs; memory of its own is "
      "accepted");
  group.each([&](int rank) {
    const GuardedStep step(needs_of(problem), problem);
    StepMemory memory = step.memory();
    // The smaller one lies within the larger: what lay behind it might be any other memory.
    if (rank == 1) memory.x_rows = step.backward_memory.as<bf16>().first(memory.x_rows.size());
    const Saved saved =
        group.layer(rank).forward(group.plan(rank), group.forward_args(rank), {.memory = memory});
    said[rank] = refusal(
        [&] { group.layer(rank).backward(saved, group.backward_args(rank), {.memory = memory}); });
  });
  expect_all_said(
      "rank 1: memory.backward_memory shares memory with memory.x_rows; memory of its own is "
      "accepted");
  group.expect_step_works("after refusals");
}

TEST_F(RefusedMemory, OfRowsThatNoLayerHas) {
  const auto said = [&](std::int64_t rows) {
    return refusal([&] { Layer::memory_needs(problem_, Backend::kCpu, 1, rows); });
  };
  for (const std::int64_t rows : {-128L, 1L, 129L, needs_.rows + 128}) {
    EXPECT_STATES(said(rows), cat("rows is ", rows, "; a multiple of row_align=128 below ",
                                  needs_.rows, " is accepted, or that capacity"));
  }
  EXPECT_EQ(said(128), "nothing");
  EXPECT_EQ(said(0), "nothing");
  const auto of = [&](std::int64_t rows) {
    return Layer::memory_needs(problem_, Backend::kCpu, 1, rows);
  };
  EXPECT_EQ(of(0).rows, 128);
  EXPECT_EQ(of(0).backward_memory, of(128).backward_memory);
  EXPECT_LT(of(0).backward_memory, needs_.backward_memory);
}

TEST_F(RefusedMemory, OfMoreRanksThanAGroupHas) {
  Problem large = problem_;
  large.num_experts = 4096;
  EXPECT_EQ(refusal([&] { Layer::memory_needs(large, Backend::kCpu, 64); }), "nothing");
  EXPECT_EQ(refusal([&] { Layer::memory_needs(large, Backend::kCpu, 128); }),
            "group size is 128; 1 to 64 is accepted");
}

TEST_F(RefusedMemory, OfALayerWhoseChoicesHaveNoNames) {
  for (const int number : {-1, 3, 1 << 20}) {
    Problem p = problem_;
    p.save = static_cast<Save>(number);
    EXPECT_NE(refusal([&] { Layer(p, alone_); }).find("problem.save is"), std::string::npos);
    p = problem_;
    p.activation = static_cast<Activation>(number == 3 ? kNumActivations : number);
    EXPECT_NE(refusal([&] { Layer(p, alone_); }).find("problem.activation is"), std::string::npos);
  }
}

TEST_F(RefusedMemory, ThatDoesNotHoldAPlan) {
  Layer layer(problem_, alone_);
  LayerResult result = workload::make_result(data_, {});
  const GuardedStep kept(needs_, problem_);
  const StepMemory m = kept.memory();
  const auto restored = [&](std::int64_t tokens) {
    return refusal([&] { layer.restore(m, tokens); });
  };
  const char* kNoPlan =
      "memory.plan does not hold a plan; what Layer::plan wrote, unchanged, is accepted";
  EXPECT_EQ(restored(data_.tokens), kNoPlan) << "garbage";
  (void)layer.forward(layer.plan(split_.topk_ids(0), {.memory = m}), split_.forward_args(0, result),
                      {.memory = m});
  EXPECT_EQ(restored(data_.tokens), "nothing");
  EXPECT_EQ(restored(data_.tokens - 1), cat("memory.plan holds a plan of ", data_.tokens,
                                            " tokens; one of ", data_.tokens - 1, " is accepted"));
  EXPECT_EQ(restored(data_.tokens + 1), cat("tokens is ", data_.tokens + 1,
                                            "; 0 to max_tokens=", data_.tokens, " is accepted"));
  EXPECT_EQ(refusal([&] { layer.restore({.plan = m.plan}, data_.tokens); }),
            "memory has no x_rows, h and row_probs; what forward was given is accepted");
  Problem other = problem_;
  other.row_align = 64;
  GuardedMemory plan_of_other(needs_of(other, 1).plan);
  Layer(other, alone_).plan(split_.topk_ids(0), {.memory = {.plan = plan_of_other.bytes()}});
  StepMemory of_other = m;
  of_other.plan = plan_of_other.bytes();
  EXPECT_EQ(refusal([&] { layer.restore(of_other, data_.tokens); }),
            cat("memory.plan holds the plan of rank 0 of 1 for ", to_string(other),
                "; that of rank 0 of 1 for ", to_string(problem_), " is accepted"));
  const auto header = static_cast<std::size_t>(CpuPlanLayout(problem_, 1).header);
  for (std::size_t i = 0; i < sizeof(CpuPlanHeader); ++i) {
    for (const std::byte bits : {std::byte{1}, std::byte{0xff}}) {
      m.plan[header + i] ^= bits;
      EXPECT_EQ(restored(data_.tokens), kNoPlan) << "byte " << i << " of the header changed";
      m.plan[header + i] ^= bits;
    }
  }
  m.plan[static_cast<std::size_t>(CpuPlanLayout(problem_, 1).topk_ids)] ^= std::byte{1};
  EXPECT_EQ(restored(data_.tokens), kNoPlan) << "an id changed";
}

// ---- A routing that cannot be planned, as values

TEST(OverflowValues, AreAlikeOnAllRanksAndTheGroupGoesOn) {
  LayerData data = plain_layer(kRanks);
  std::ranges::fill(data.topk_ids, 3);  // of rank 1
  const workload::Split split(data, kRanks);
  Problem problem = split.problem();
  problem.row_align = 16;
  problem.capacity_rows = 32;
  const Schedule schedule = parse_schedule("single,tile_m=16");
  LayerResult result = workload::make_result(data, {});
  run_ranks(Communicator::cpu_group(kRanks), [&](Communicator& c) {
    Layer layer(problem, c);
    std::int64_t overflow[2] = {-1, -1};
    const RoutingPlan plan = layer.plan(split.topk_ids(c.rank()), {.overflow = overflow});
    EXPECT_EQ(Overflow{overflow[0]}, Overflow::kRows);
    EXPECT_EQ(overflow[1], data.tokens * data.topk);
    const ForwardArgs forward = split.forward_args(c.rank(), result);
    const Saved saved = layer.forward(plan, forward, schedule);
    BackwardArgs args = split.backward_args(c.rank(), result);
    layer.backward(saved, args, schedule);
    for (const bf16 v : forward.out) ASSERT_TRUE(std::isnan(to_float(v)));
    for (const bf16 v : args.dx) ASSERT_TRUE(std::isnan(to_float(v)));
    for (const float v : args.dprobs) ASSERT_EQ(v, 0.0f);
    for (const bf16 v : std::get<ExpertMatrices<bf16>>(args.dw1).tensor()) ASSERT_EQ(v.bits, 0);

    std::vector<std::int32_t> even(split.topk_ids(c.rank()).size());
    for (std::size_t i = 0; i < even.size(); ++i) even[i] = static_cast<int>(i % 4);
    layer.plan(even, {.overflow = overflow});
    EXPECT_EQ(Overflow{overflow[0]}, Overflow::kNone);
    EXPECT_EQ(overflow[1], 32);
  });
}

TEST(OverflowValues, OfSomeRanksAloneAreRefused) {
  LayerGroup g(plain_layer(kRanks), kRanks);
  g.make_layers();
  for (const Outcome& o : g.attempt([&](int rank) {
         std::int64_t overflow[2];
         g.layer(rank).plan(g.split().topk_ids(rank), {.overflow = rank == 0 ? overflow : nullptr});
       })) {
    EXPECT_STATES(
        o.what(),
        "ranks disagree: rank 0 calls plan of layer 1 with overflow; rank 1 calls plan of "
        "layer 1; the same call on every rank is accepted");
  }
  g.expect_step_works("afterwards");
}

/// Without the flag, what was restored from such a plan says what the plan would have.
TEST(OverflowValues, ARestoredPlanThatIsNotFlaggedThrows) {
  LayerData data = plain_layer(1);
  data.topk_ids[3] = 7;
  const workload::Split split(data, 1);
  Layer layer(split.problem(), Communicator::cpu_group(1)[0]);
  const GuardedStep kept(needs_of(split.problem(), 1), split.problem());
  LayerResult result = workload::make_result(data, {});
  std::int64_t overflow[2];
  const CallOptions options{.memory = kept.memory(), .overflow = overflow};
  (void)layer.forward(layer.plan(split.topk_ids(0), options), split.forward_args(0, result),
                      options);
  EXPECT_EQ(Overflow{overflow[0]}, Overflow::kImpossible);
  const StepMemory memory = kept.saved();
  EXPECT_NO_THROW(layer.restore(memory, data.tokens, true));
  expect_invalid("topk_ids of rank 0, token 1, slot 1 is 7; -1 (dropped) to 1 is accepted",
                 [&] { layer.restore(memory, data.tokens); });
}

}  // namespace
}  // namespace uniep::testing
