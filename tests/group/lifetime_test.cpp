// What lives from call to call: layers, saved activations, counters.
#include <gtest/gtest.h>

#include "base/check.h"
#include "support/cases.h"
#include "support/layer_group.h"
#include "support/new_threads.h"
#include "support/random_routing.h"

namespace uniep::testing {
namespace {

TEST(Lifetime, ManyLayersShareACommunicator) {
  constexpr int kSize = 3;
  constexpr int kLayers = 5;
  Rng rng(7);
  std::vector<LayerData> data;
  std::vector<LayerResult> results;
  for (int i = 0; i < kLayers; ++i) {
    data.push_back(random_layer(rng, kSize));
    results.push_back(workload::make_result(data.back(), {}));
  }
  run_ranks(Communicator::cpu_group(kSize), [&](Communicator& c) {
    std::vector<Layer> layers;
    std::vector<Saved> saved;
    for (const LayerData& d : data) layers.emplace_back(workload::Split(d, kSize).problem(), c);
    for (std::size_t i = 0; i < layers.size(); ++i) {  // forward through all, and back, as a model
      const workload::Split split(data[i], kSize);
      const RoutingPlan plan = layers[i].plan(split.topk_ids(c.rank()));
      saved.push_back(layers[i].forward(plan, split.forward_args(c.rank(), results[i])));
    }
    for (std::size_t i = layers.size(); i-- > 0;) {
      const workload::Split split(data[i], kSize);
      layers[i].backward(saved[i], split.backward_args(c.rank(), results[i]));
      layers.erase(layers.begin() + static_cast<std::ptrdiff_t>(i));  // others go on
    }
  });
  for (std::size_t i = 0; i < data.size(); ++i) {
    expect_same_bits(results[i], reference::contract(data[i]), cat("layer ", i));
  }
}

/// The same layer with other tokens.
LayerData other_batch(const LayerData& d, unsigned seed) {
  Rng rng(seed);
  LayerData other = d;
  other.x = random_bf16(rng, d.tokens * d.hidden, 1);
  other.dy = random_bf16(rng, d.tokens * d.hidden, 1);
  for (auto& id : other.topk_ids) id = static_cast<std::int32_t>(pick(rng, -1, d.num_experts - 1));
  return other;
}

TEST(Lifetime, SeveralSavedAreUsedInAnyOrderAndAgain) {
  constexpr int kSize = 2;
  std::vector<LayerData> batches{plain_layer(kSize)};
  for (unsigned i = 1; i < 4; ++i) batches.push_back(other_batch(batches[0], i));
  std::vector<LayerResult> results;
  for (const LayerData& d : batches) results.push_back(workload::make_result(d, {}));
  std::vector<LayerResult> again = results;
  run_ranks(Communicator::cpu_group(kSize), [&](Communicator& c) {
    const int rank = c.rank();
    Layer layer(workload::Split(batches[0], kSize).problem(), c);
    std::vector<Saved> saved;
    for (std::size_t i = 0; i < batches.size(); ++i) {
      const workload::Split split(batches[i], kSize);
      const RoutingPlan plan = layer.plan(split.topk_ids(rank));
      saved.push_back(layer.forward(plan, split.forward_args(rank, results[i])));
    }
    for (const std::size_t i : {2u, 0u, 3u, 1u}) {
      const workload::Split split(batches[i], kSize);
      layer.backward(saved[i], split.backward_args(rank, results[i]));
    }
    for (const std::size_t i : {1u, 1u, 3u, 2u, 0u}) {  // other schedules, some twice
      Schedule schedule = parse_schedule(i % 2 == 0 ? "pipelined:3" : "sequential");
      const workload::Split split(batches[i], kSize);
      layer.backward(saved[i], split.backward_args(rank, again[i]), schedule);
    }
  });
  for (std::size_t i = 0; i < batches.size(); ++i) {
    const LayerResult want = reference::contract(batches[i]);
    expect_same_bits(results[i], want, cat("batch ", i));
    again[i].out = want.out;
    expect_same_bits(again[i], want, cat("batch ", i, " again"));
  }
}

TEST(Lifetime, SavedHoldsHAsTheRoutingPlanSays) {
  LayerGroup g(plain_layer(2), 2);
  EXPECT_TRUE(g.saved(0).h().empty());
  EXPECT_EQ(g.saved(0).bytes(), 0u);
  EXPECT_THROW(g.saved(0).plan(), Error);
  g.make_layers();
  g.make_plans();
  g.each([&](int rank) { g.forward(rank); });
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(g.saved(rank).plan().row_origin().data(), g.plan(rank).row_origin().data());
    EXPECT_EQ(static_cast<std::int64_t>(g.saved(rank).h().size()),
              g.plan(rank).padded_rows() * 2 * g.data().intermediate);
    EXPECT_GE(g.saved(rank).bytes(), g.saved(rank).h().size_bytes());
  }
}

TEST(Lifetime, ASavedOutlivesItsLayer) {
  LayerGroup g(plain_layer(2), 2);
  g.make_layers();
  g.make_plans();
  g.each([&](int rank) { g.forward(rank); });
  g.drop_layers();
  g.make_layers();
  g.each([&](int rank) { g.backward(rank); });
  g.expect_contract("backward on a new layer of the same problem");
}

/// A batch of at most `d.tokens` tokens with routing of its own, for the layer `d`.
LayerData random_batch(Rng& rng, const LayerData& d) {
  LayerData b = d;
  b.tokens = pick(rng, 0, d.tokens);
  b.x = random_bf16(rng, b.tokens * d.hidden, 1);
  b.dy = random_bf16(rng, b.tokens * d.hidden, 1);
  b.topk_ids.clear();
  b.topk_probs.clear();
  const int most = static_cast<int>(pick(rng, 0, d.num_experts - 1));
  for (std::int64_t i = 0; i < b.tokens * d.topk; ++i) {
    b.topk_ids.push_back(static_cast<std::int32_t>(pick(rng, chance(rng, 50) ? -1 : 0, most)));
    b.topk_probs.push_back(0.01f * static_cast<float>(pick(rng, 1, 99)));
  }
  return b;
}

class ManySteps : public ::testing::TestWithParam<std::uint32_t> {};

INSTANTIATE_TEST_SUITE_P(CountersStart, ManySteps,
                         ::testing::Values(0u, 0x7fffff00u, 0xffffff00u, 0xffffffffu));

// Counters only grow, over batches of other sizes, with other tiles, blocks and wires: each step
// counts from where the last one left them, through 2^32 as well.
TEST_P(ManySteps, OfChangingBatchesAndSchedulesOnOneLayer) {
  constexpr int kSize = 3;
  const int steps = cases(200);
  Rng rng(GetParam());
  LayerData layer_data = random_layer(rng, kSize, {.max_hidden = 40, .max_intermediate = 40});
  layer_data.tokens = 40;
  Problem problem{.hidden = layer_data.hidden,
                  .intermediate = layer_data.intermediate,
                  .num_experts = layer_data.num_experts,
                  .topk = layer_data.topk,
                  .max_tokens = layer_data.tokens};
  const auto group = Communicator::cpu_group(kSize);
  std::vector<std::optional<Layer>> layers(kSize);
  run_ranks(group, [&](Communicator& c) {
    layers[static_cast<std::size_t>(c.rank())].emplace(
        problem, c, LayerOptions{.fault_injection = {.first_count = GetParam()}});
  });
  for (int step = 0; step < steps; ++step) {
    const LayerData batch = random_batch(rng, layer_data);
    const workload::Split split(batch, random_parts(rng, batch.tokens, kSize));
    const Schedule forward = random_schedule(rng, problem, 3);
    const Schedule backward = random_schedule(rng, problem, 3);
    LayerResult result = workload::make_result(batch, {});
    run_ranks(group, [&](Communicator& c) {
      Layer& layer = *layers[static_cast<std::size_t>(c.rank())];
      const RoutingPlan plan = layer.plan(split.topk_ids(c.rank()));
      const Saved saved = layer.forward(plan, split.forward_args(c.rank(), result), forward);
      layer.backward(saved, split.backward_args(c.rank(), result), backward);
    });
    expect_same_bits(result, reference::contract(batch),
                     cat("step ", step, "\n  forward ", to_string(forward), "\n  backward ",
                         to_string(backward)));
    if (HasFailure()) return;
  }
}

TEST(Lifetime, ForwardAloneNeedsNoBackward) {
  LayerGroup g(plain_layer(2), 2);
  g.make_layers();
  g.make_plans();
  for (int i = 0; i < 3; ++i) {
    g.clear_result();
    g.each([&](int rank) { g.forward(rank); });
    EXPECT_EQ(g.result().out, reference::contract(g.data()).out);
  }
}

TEST(Lifetime, NoThreadOutlivesItsLayer) {
  const NewThreads threads;
  for (int i = 0; i < 3; ++i) {
    LayerGroup g(plain_layer(2), 2);
    g.make_layers();
    g.make_plans();
    Schedule schedule;
    schedule.workers = 4;
    g.each([&](int rank) { g.forward(rank, schedule); });
    EXPECT_EQ(threads.settled_at(2 * 3), 2 * 3);
  }
  EXPECT_EQ(threads.settled_at(0), 0);
}

TEST(Lifetime, AMovedLayerWorks) {
  LayerGroup g(plain_layer(2), 2);
  g.make_layers();
  g.each([&](int rank) {
    Layer moved = std::move(g.layer(rank));
    g.layer(rank) = std::move(moved);
  });
  g.expect_step_works("after moves");
}

}  // namespace
}  // namespace uniep::testing
