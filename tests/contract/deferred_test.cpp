// Weight gradients in a call of their own: the bits of a whole backward pass, at every preset and
// number of ranks, with several steps under way; and clear words where the order is wrong.
#include <gtest/gtest.h>

#include <algorithm>

#include "contract/contract_testing.h"
#include "layer/arguments.h"
#include "layer/saved_data.h"
#include "layout/workspace.h"
#include "support/expect_error.h"
#include "support/guarded_memory.h"
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
          o.token_begin = workload::even_parts(data.tokens, ranks);
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

/// The plain layer with other gradients and experts.
LayerData second_batch() {
  LayerData second = plain_layer(2);
  std::ranges::reverse(second.dy);
  std::ranges::reverse(second.topk_ids);
  return second;
}

constexpr float kStart = 0.75f;  // of main gradients: with 0 the order of two sums would not count

/// Two micro-batches, as a pipeline has them: both are added to the same main_grad.
class TwoBatches : public LayerGroup {
 public:
  TwoBatches() : LayerGroup(plain_layer(2), 2, true) {
    std::ranges::fill(result().main_dw1, kStart);
    std::ranges::fill(result().main_dw2, kStart);
    make_layers();
  }

  Saved forward_first(int rank) {
    Layer& l = layer(rank);
    return l.forward(l.plan(split().topk_ids(rank)), forward_args(rank));
  }
  Saved forward_second(int rank) {
    Layer& l = layer(rank);
    return l.forward(l.plan(second_split_.topk_ids(rank)),
                     second_split_.forward_args(rank, second_result_));
  }

  /// Of the second batch, but for the gradients: those go where the first batch's go.
  BackwardArgs second_args(int rank) {
    const BackwardArgs first = backward_args(rank);
    BackwardArgs args = second_split_.backward_args(rank, second_result_);
    args.dw1 = first.dw1;
    args.dw2 = first.dw2;
    return args;
  }

  void expect_contract_of_both() {
    LayerResult first = expected(data(), true, kStart);
    const LayerResult second =
        reference::contract_into_main_grad(second_, first.main_dw1, first.main_dw2);
    first.main_dw1 = second.main_dw1;
    first.main_dw2 = second.main_dw2;
    expect_same_bits(result(), first, "first batch, and the gradients of both");
    expect_same_bits(second_result_.out, second.out, "out", "second batch");
    expect_same_bits(second_result_.dx, second.dx, "dx", "second batch");
    expect_same_bits(second_result_.dprobs, second.dprobs, "dprobs", "second batch");
  }

 private:
  const LayerData second_ = second_batch();
  const workload::Split second_split_{second_, 2};
  LayerResult second_result_ =
      workload::make_result(second_, {.backward = true, .main_grad = true});
};

TEST(DeferredWeights, StepsOneAfterAnotherAddUp) {
  TwoBatches batches;
  batches.each([&](int rank) {
    const Saved first = batches.forward_first(rank);
    batches.layer(rank).backward(first, batches.backward_args(rank));
    const Saved second = batches.forward_second(rank);
    batches.layer(rank).backward(second, batches.second_args(rank));
  });
  batches.expect_contract_of_both();
}

/// The sums are in the order of their backward_weights.
TEST(DeferredWeights, StepsUnderWayKeepTheirRows) {
  TwoBatches batches;
  batches.each([&](int rank) {
    Layer& layer = batches.layer(rank);
    Saved first = batches.forward_first(rank);
    layer.backward_data(first, data_args(batches.backward_args(rank)));
    Saved second = batches.forward_second(rank);
    layer.backward_data(second, data_args(batches.second_args(rank)));
    layer.backward_weights(first, weights_args(batches.backward_args(rank)));
    layer.backward_weights(second, weights_args(batches.second_args(rank)));
  });
  batches.expect_contract_of_both();
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
    for (const Outcome& o : group.attempt(weights)) EXPECT_STATES(o.what(), sentence);
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
  captured.push_back(*group.saved(0).data()->backward_memory);
  EXPECT_EQ(group.saved(0).bytes(), deferred_bytes);
  captured.push_back(std::make_shared<std::byte>());
  EXPECT_EQ(group.saved(0).bytes() - deferred_bytes, deferred_bytes - forward_bytes);
  captured.clear();
  const auto expect_refused = [&](const char* sentence, const BackwardWeightsArgs& wrong) {
    expect_invalid(sentence, [&] { group.layer(0).backward_weights(group.saved(0), wrong); });
  };
  const BackwardWeightsArgs right = weights_args(group.backward_args(0));
  expect_refused("dw1 has 0 elements; [E / ranks, 2I, H] needs 11520",
                 {.dw1 = std::span<bf16>(), .dw2 = right.dw2});
  expect_refused("dw2 has 0 elements; [E / ranks, H, I] needs 5760",
                 {.dw1 = right.dw1, .dw2 = std::span<bf16>()});
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

/// As where all experts of a rank are frozen, and it leaves out their gradients.
TEST(DeferredWeights, ARankMayLeaveOutWhatOthersCompute) {
  for (const char* preset : kPresets) {
    SCOPED_TRACE(preset);
    LayerGroup group(plain_layer(3), 3);
    group.make_layers();
    group.make_plans();
    const Schedule schedule = parse_schedule(cat(preset, ",tile_m=16,workers=2"));
    group.each([&](int rank) {
      group.forward(rank);
      const BackwardArgs args = group.backward_args(rank);
      if (rank == 1) {
        group.layer(rank).backward_data(group.saved(rank), data_args(args), schedule);
      } else {
        group.layer(rank).backward(group.saved(rank), args, schedule);
      }
    });
    group.layer(1).backward_weights(group.saved(1), weights_args(group.backward_args(1)));
    group.expect_contract("rank 1 later");
  }
}

/// Rows of the caller's say which backward_data it is: not the last one on the same saved.
TEST(DeferredWeights, OfEachOfSeveralPassesOnOneForward) {
  const LayerData data = plain_layer(2);
  LayerGroup group(data, 2);
  group.make_layers();
  group.make_plans();
  group.each([&](int rank) {
    Layer& layer = group.layer(rank);
    group.forward(rank);
    const BackwardArgs args = group.backward_args(rank);
    const MemoryNeeds needs = Layer::memory_needs(layer.problem(), Backend::kCpu, 2);
    const GuardedMemory memory[] = {GuardedMemory(needs.backward_memory),
                                    GuardedMemory(needs.backward_memory)};
    const auto in_memory_of = [&](int pass) {
      return CallOptions{.memory = {.backward_memory = memory[pass].bytes()}};
    };
    layer.backward_data(group.saved(rank), data_args(args), in_memory_of(0));
    std::vector<bf16> other_dy(args.dy.begin(), args.dy.end());
    std::ranges::reverse(other_dy);
    std::vector<bf16> dx(args.dx.size());
    std::vector<float> dprobs(args.dprobs.size());
    BackwardDataArgs other = data_args(args);
    other.dy = other_dy;
    other.dx = dx;
    other.dprobs = dprobs;
    layer.backward_data(group.saved(rank), other, in_memory_of(1));
    layer.backward_weights(group.saved(rank), weights_args(args), in_memory_of(0));
  });
  group.expect_contract("of the first pass");
  std::byte one{};
  const RowLayout needed(group.layer(0).problem(), group.saved(0).data()->rows, Pass::kBackward);
  expect_invalid(cat("memory.backward_memory has 1 bytes; ", needed.bytes,
                     " or more are accepted (Layer::memory_needs)"),
                 [&] {
                   group.layer(0).backward_weights(group.saved(0),
                                                   weights_args(group.backward_args(0)),
                                                   {.memory = {.backward_memory = {&one, 1}}});
                 });
}

}  // namespace
}  // namespace uniep::testing
