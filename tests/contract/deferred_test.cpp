// Weight gradients in a call of their own: the bits of a whole backward pass, at every preset and
// number of ranks, with several steps under way; and clear words where the order is wrong.
#include <gtest/gtest.h>

#include "contract/contract_testing.h"
#include "layer/arguments.h"
#include "layer/saved_data.h"
#include "support/expect_error.h"
#include "support/layer_group.h"

namespace uniep::testing {
namespace {

constexpr const char* kPresets[] = {"sequential", "pipelined:2", "two-kernel", "single"};

TEST(DeferredWeights, EveryPresetAtEveryNumberOfRanks) {
  for (const int ranks : {1, 2, 3, 4, 5, 8}) {
    const LayerData data = plain_layer(ranks);
    for (const char* preset : kPresets) {
      for (const char* wgrad : {"separate", "after", "interleaved"}) {
        for (const bool main_grad : {false, true}) {
          RunOptions o;
          o.token_begin = even_parts(data.tokens, ranks);
          o.forward_schedule = parse_schedule(cat(preset, ",tile_m=16,workers=2"));
          o.backward_schedule = o.forward_schedule;
          o.weights_schedule = parse_schedule(cat(preset, ",wgrad=", wgrad, ",workers=3"));
          o.defer_weights = true;
          o.main_grad = main_grad;
          o.main_grad_start = 0.75f;
          expect_same_bits(run_layer(data, o), expected(data, main_grad, 0.75f),
                           cat(ranks, " ranks, ", preset, ", wgrad=", wgrad));
        }
      }
    }
  }
}

/// Two micro-batches, as a pipeline has them: both are added to the same main_grad, in the order of
/// their backward_weights.
TEST(DeferredWeights, StepsUnderWayKeepTheirRows) {
  LayerGroup whole(plain_layer(2), 2, true);
  LayerGroup parts(plain_layer(2), 2, true);
  LayerData second = plain_layer(2);
  std::ranges::reverse(second.dy);
  std::ranges::reverse(second.topk_ids);
  const workload::Split other(second, 2);
  LayerResult unused = workload::make_result(second, {.backward = true, .main_grad = true});
  /// Of the second batch, but for the gradients: those go where the first batch's go.
  const auto other_args = [&](LayerGroup& group, int rank) {
    BackwardArgs args = other.backward_args(rank, unused);
    args.dw1 = group.backward_args(rank).dw1;
    args.dw2 = group.backward_args(rank).dw2;
    return args;
  };
  whole.make_layers();
  whole.each([&](int rank) {
    Layer& layer = whole.layer(rank);
    const Saved first =
        layer.forward(layer.plan(whole.split().topk_ids(rank)), whole.forward_args(rank));
    layer.backward(first, whole.backward_args(rank));
    const Saved next =
        layer.forward(layer.plan(other.topk_ids(rank)), other.forward_args(rank, unused));
    layer.backward(next, other_args(whole, rank));
  });
  parts.make_layers();
  parts.each([&](int rank) {
    Layer& layer = parts.layer(rank);
    Saved first = layer.forward(layer.plan(parts.split().topk_ids(rank)), parts.forward_args(rank));
    layer.backward_data(first, data_args(parts.backward_args(rank)));
    Saved next = layer.forward(layer.plan(other.topk_ids(rank)), other.forward_args(rank, unused));
    layer.backward_data(next, data_args(other_args(parts, rank)));
    layer.backward_weights(first, weights_args(parts.backward_args(rank)));
    layer.backward_weights(next, weights_args(other_args(parts, rank)));
  });
  expect_same_bits(parts.result(), whole.result(), "two steps under way");
}

TEST(DeferredWeights, OrderIsToldWhereItIsWrongAndNothingIsWritten) {
  LayerGroup group(plain_layer(2), 2);
  group.make_layers();
  group.make_plans();
  const char* complaint =
      "saved holds no rows of a backward pass; backward_weights is accepted once after each "
      "backward_data on the same saved";
  const auto weights = [&](int rank) {
    group.layer(rank).backward_weights(group.saved(rank), weights_args(group.backward_args(rank)));
  };
  const auto expect_complaint = [&](const char* sentence) {
    for (const Outcome& o : group.attempt(weights)) EXPECT_EQ(o.what(), sentence);
  };
  expect_complaint("saved is empty; what forward returned is accepted");
  group.each([&](int rank) { group.forward(rank); });
  const std::size_t forward_bytes = group.saved(0).bytes();
  expect_complaint(complaint);
  group.each([&](int rank) { group.backward(rank); });
  expect_complaint(complaint);

  group.clear_result();
  group.each([&](int rank) {
    group.forward(rank);
    // A second time: the rows are those of this one.
    for (int i = 0; i < 2; ++i) {
      group.layer(rank).backward_data(group.saved(rank), data_args(group.backward_args(rank)));
    }
  });
  const std::size_t deferred_bytes = group.saved(0).bytes();
  EXPECT_GT(deferred_bytes, forward_bytes);
  // As captured calls on GPUs do, whose replays write their rows again: of this one and another.
  auto& captured = group.saved(0).data()->captured_rows;
  captured.push_back(*group.saved(0).data()->backward_rows);
  EXPECT_EQ(group.saved(0).bytes(), deferred_bytes);
  captured.push_back(std::make_shared<std::byte>());
  EXPECT_EQ(group.saved(0).bytes() - deferred_bytes, deferred_bytes - forward_bytes);
  captured.clear();
  BackwardWeightsArgs wrong = weights_args(group.backward_args(0));
  wrong.dw1 = std::span<bf16>();
  EXPECT_THROW(group.layer(0).backward_weights(group.saved(0), wrong), Error);
  group.each(weights);  // a refused call has used nothing up
  EXPECT_EQ(group.saved(0).bytes(), forward_bytes);
  group.expect_contract("after complaints");
  expect_complaint(complaint);
  group.expect_contract("after one more");
}

/// It waits for nobody: one rank may be late, or never come.
TEST(DeferredWeights, AreNotCollective) {
  LayerGroup group(plain_layer(3), 3);
  group.make_layers();
  group.make_plans();
  group.each([&](int rank) {
    group.forward(rank);
    group.layer(rank).backward_data(group.saved(rank), data_args(group.backward_args(rank)));
  });
  for (const int rank : {2, 0, 1}) {
    group.layer(rank).backward_weights(group.saved(rank), weights_args(group.backward_args(rank)));
  }
  group.expect_contract("rank after rank");
}

/// A rank that calls another part than its peers is told, like any other disagreement.
TEST(DeferredWeights, APartAndTheWholeDoNotMix) {
  LayerGroup group(plain_layer(2), 2);
  group.make_layers();
  group.make_plans();
  group.each([&](int rank) { group.forward(rank); });
  const auto outcomes = group.attempt([&](int rank) {
    if (rank == 0) return group.backward(rank);
    group.layer(rank).backward_data(group.saved(rank), data_args(group.backward_args(rank)));
  });
  for (const Outcome& o : outcomes)
    EXPECT_EQ(o.what().rfind("ranks disagree: ", 0), 0u) << o.what();
}

}  // namespace
}  // namespace uniep::testing
