// Backward in a ring of rows (Problem::backward_rows): the bits are those of memory for all rows,
// and what does not fit is refused with a sentence, on all ranks alike. Random layers are in
// contract_test.cpp.
#include <gtest/gtest.h>

#include <cmath>
#include <iterator>

#include "contract/contract_testing.h"
#include "support/expect_error.h"
#include "support/expect_same.h"
#include "support/layer_group.h"

namespace uniep::testing {
namespace {

constexpr int kRanks = 2;
constexpr const char* kPresets[] = {"sequential",
                                    "pipelined:2",
                                    "two-kernel",
                                    "single",
                                    "single,dispatch_workers=0",
                                    "single,lag=4,head_start=50"};

/// Rows of a rank for some laps of a ring that has room for its fullest expert.
LayerData layer_of_many_experts() {
  Rng rng(7);
  LayerData data;
  data.tokens = 60;
  data.hidden = 40;
  data.intermediate = 24;
  data.num_experts = 16;
  data.topk = 2;
  data.x = random_bf16(rng, data.tokens * data.hidden, 1);
  data.dy = random_bf16(rng, data.tokens * data.hidden, 1);
  data.w1 = random_bf16(rng, data.num_experts * 2 * data.intermediate * data.hidden, 0.3f);
  data.w2 = random_bf16(rng, data.num_experts * data.hidden * data.intermediate, 0.3f);
  for (std::int64_t i = 0; i < data.tokens * data.topk; ++i) {
    // Expert 5 gets nothing, expert 2 most.
    const auto any = static_cast<std::int32_t>(pick(rng, 0, data.num_experts - 1));
    data.topk_ids.push_back(any == 5 || chance(rng, 20) ? 2 : any);
    data.topk_probs.push_back(0.25f + 0.01f * static_cast<float>(i % 50));
  }
  return data;
}

RunOptions ring_options(const LayerData& data, const char* preset, int ring_tiles) {
  RunOptions o;
  o.token_begin = workload::even_parts(data.tokens, kRanks);
  o.forward_schedule = parse_schedule(cat(preset, ",tile_m=16,workers=3"));
  o.backward_schedule = o.forward_schedule;
  o.row_align = 16;
  o.ring_tiles = ring_tiles;
  return o;
}

TEST(RowRing, EveryPresetWhateverIsKept) {
  const LayerData data = layer_of_many_experts();
  for (const char* preset : kPresets) {
    for (const Save save : kSaves) {
      for (const bool recompute_h : {false, true}) {
        for (const int ring_tiles : {0, 1, 3}) {
          RunOptions o = ring_options(data, preset, ring_tiles);
          o.save = save;
          o.recompute_h = recompute_h;
          expect_same_bits(run_layer(data, o), expected(data, o),
                           cat(preset, ", save ", name(save), ", recompute_h ", recompute_h,
                               ", ring_tiles ", ring_tiles));
        }
      }
    }
  }
}

/// Their rows of dy take part in the ring, wherever probabilities enter; those of x need no ring.
TEST(RowRing, SharedExpertsTakeTheirTurn) {
  Rng rng(11);
  LayerData data = layer_of_many_experts();
  data.shared_experts = 2;
  draw_shared(rng, data);
  for (const char* preset : kPresets) {
    for (const Probs probs : {Probs::kBefore, Probs::kAfter}) {
      for (const int ring_tiles : {1, 3}) {
        data.probs = probs;
        RunOptions o = ring_options(data, preset, ring_tiles);
        o.save = kSaves[rng() % std::size(kSaves)];
        o.recompute_h = chance(rng, 50);
        expect_same_bits(run_layer(data, o), expected(data, o),
                         cat(preset, ", probs ", name(probs), ", save ", name(o.save),
                             ", ring_tiles ", ring_tiles));
      }
    }
  }
}

TEST(RowRing, HalvesWhatBackwardWorksIn) {
  const Problem all{
      .hidden = 7168, .intermediate = 2048, .num_experts = 256, .topk = 8, .max_tokens = 8192};
  Problem half = all;
  half.backward_rows = round_up<std::int64_t>(capacity_rows(all, 4) / 2, 128);
  for (const Save save : kSaves) {
    for (const bool recompute_h : {false, true}) {
      Problem p = all, q = half;
      p.save = q.save = save;
      p.recompute_h = q.recompute_h = recompute_h;
      const MemoryNeeds needs = Layer::memory_needs(p, Backend::kCpu, 4);
      const MemoryNeeds less = Layer::memory_needs(q, Backend::kCpu, 4);
      EXPECT_NEAR(static_cast<double>(less.backward_memory),
                  static_cast<double>(needs.backward_memory) / 2, 4e6);
      EXPECT_EQ(less.forward_memory, needs.forward_memory);
      EXPECT_EQ(less.rows, needs.rows);
    }
  }
}

TEST(RowRing, KeepsNoRowsBetweenTheParts) {
  const LayerData data = plain_layer(kRanks);
  const workload::Split split(data, kRanks);
  Problem problem = split.problem();
  problem.backward_rows = 4096;
  LayerResult result = workload::make_result(data, {.backward = true});
  run_ranks(Communicator::cpu_group(kRanks), [&](Communicator& c) {
    Layer layer(problem, c);
    const RoutingPlan plan = layer.plan(split.topk_ids(c.rank()));
    Saved saved = layer.forward(plan, split.forward_args(c.rank(), result));
    const BackwardArgs args = split.backward_args(c.rank(), result);
    constexpr const char* kSaid =
        "backward_data and backward_weights keep all rows in between, but the layer has "
        "backward_rows=4096; backward is accepted, or a layer with backward_rows=0";
    expect_invalid(cat("rank 0: ", kSaid), [&] { layer.backward_data(saved, data_args(args)); });
    expect_invalid(kSaid, [&] { layer.backward_weights(saved, weights_args(args)); });
    layer.backward(saved, args);
  });
  expect_same_bits(result, expected(data, false, 0), "afterwards");
}

/// An expert with more rows than the ring: a value on all ranks, and the group goes on.
TEST(RowRing, AnExpertWithTooManyRowsIsRefusedOnAllRanks) {
  LayerData data = plain_layer(kRanks);
  std::ranges::fill(data.topk_ids, 3);  // of rank 1
  const workload::Split split(data, kRanks);
  Problem problem = split.problem();
  problem.row_align = 16;
  problem.backward_rows = 32;
  const std::int64_t enough = round_up<std::int64_t>(data.tokens * data.topk, 16);
  const Schedule schedule = parse_schedule("single,tile_m=16");
  LayerResult result = workload::make_result(data, {.backward = true});
  run_ranks(Communicator::cpu_group(kRanks), [&](Communicator& c) {
    Layer layer(problem, c);
    std::int64_t overflow[2] = {-1, -1};
    const RoutingPlan plan = layer.plan(split.topk_ids(c.rank()), {.overflow = overflow});
    EXPECT_EQ(Overflow{overflow[0]}, Overflow::kExpertRows);
    EXPECT_EQ(overflow[1], enough);
    const ForwardArgs forward = split.forward_args(c.rank(), result);
    const Saved saved = layer.forward(plan, forward, schedule);
    layer.backward(saved, split.backward_args(c.rank(), result), schedule);
    for (const bf16 v : forward.out) ASSERT_TRUE(std::isnan(to_float(v)));
    expect_error(ErrorCode::kCapacity,
                 cat("expert 3 of rank 1 would receive ", enough,
                     " rows (padding included), but backward_rows is 32; backward_rows=", enough,
                     " or more would do for this routing, or 0"),
                 [&] { layer.plan(split.topk_ids(c.rank())); });
  });
  problem.backward_rows = enough;
  run_ranks(Communicator::cpu_group(kRanks), [&](Communicator& c) {
    Layer layer(problem, c);
    const RoutingPlan plan = layer.plan(split.topk_ids(c.rank()));
    const Saved saved = layer.forward(plan, split.forward_args(c.rank(), result), schedule);
    layer.backward(saved, split.backward_args(c.rank(), result), schedule);
  });
  expect_same_bits(result, expected(data, false, 0), "with the rows that were named");
}

}  // namespace
}  // namespace uniep::testing
