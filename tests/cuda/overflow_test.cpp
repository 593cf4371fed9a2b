// A routing that cannot be planned, told by values on the device: nothing throws, and what follows
// is as ever. A process for each rank.
#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <functional>
#include <optional>
#include <vector>

#include "base/math.h"
#include "cuda/caller_memory.h"
#include "cuda/cuda_schedules.h"
#include "cuda/graph.h"
#include "cuda/overflow_batches.h"
#include "uniep/tune.h"

namespace uniep::testing {
namespace {

using std::chrono::milliseconds;

constexpr int kLimitMs = 8000;  // of a failing call

class CudaOverflow : public OnGpus {};
INSTANTIATE_TEST_SUITE_P(Gpus, CudaOverflow, ::testing::Values(1, 2, 4), ranks_name);

/// Rows of the fullest rank, padding included.
std::int64_t rows_of(const LayerData& data, int ranks) {
  std::vector<std::int64_t> rows(static_cast<std::size_t>(data.num_experts));
  for (const std::int32_t id : data.topk_ids) {
    if (id >= 0) ++rows[static_cast<std::size_t>(id)];
  }
  const std::size_t local = rows.size() / static_cast<std::size_t>(ranks);
  std::int64_t most = 0;
  for (std::size_t first = 0; first < rows.size(); first += local) {
    std::int64_t of_rank = 0;
    for (std::size_t e = first; e < first + local; ++e) {
      of_rank += round_up<std::int64_t>(rows[e], Problem{}.row_align);
    }
    most = std::max(most, of_rank);
  }
  return most;
}

/// What is wrong with results of a step that cannot be planned, or "".
std::string values_of_fault(const LayerResult& r, bool main_grad) {
  for (const bf16 v : r.out) {
    if (!std::isnan(to_float(v))) return "out is not NaN";
  }
  for (const bf16 v : r.dx) {
    if (v != bf16{0x7fc0}) return "dx is not the NaN of a fault";
  }
  for (const float v : r.dprobs) {
    if (v != 0) return "dprobs is not 0";
  }
  for (const auto* dw : {&r.dw1, &r.dw2}) {
    for (const bf16 v : *dw) {
      if (v.bits != 0) return "a weight gradient is not 0";
    }
  }
  for (const auto* dw : {&r.main_dw1, &r.main_dw2}) {
    for (const float v : *dw) {
      if (main_grad && v != GpuRank::kMainGradStart) return "a main_grad was added to";
    }
  }
  return "";
}

using Values = std::array<std::int64_t, 2>;

/// Runs `step` on batches that fit, that do not, and that have an impossible id.
std::string steps_with_overflow(const Communicator& c, GpuRank& rank, bool main_grad,
                                const DeviceTensor<std::int64_t>& overflow,
                                const std::function<void()>& step) {
  const LayerData fits = fitting_batch(c.size()), does_not = overflowing_batch(c.size());
  LayerData impossible = fits;
  impossible.topk_ids[3] = impossible.num_experts;
  GpuRank own(fits, c, {}, {.main_grad = main_grad});
  const LayerResult want = own.step(cuda_schedules()[0]);
  const struct {
    const LayerData& batch;
    Values values;
  } cases[] = {{fits, {0, rows_of(fits, c.size())}},
               {does_not, {1, rows_of(does_not, c.size())}},
               {fits, {0, rows_of(fits, c.size())}},
               {impossible, {2, 0}},
               {fits, {0, rows_of(fits, c.size())}}};
  for (const auto& [batch, values] : cases) {
    rank.load(batch);
    step();
    rank.layer().synchronize();  // throws for none of them
    const std::vector<std::int64_t> got = overflow.to_host();
    if (got[0] != values[0] || got[1] != values[1]) {
      return cat("overflow is ", got[0], ", ", got[1], " instead of ", values[0], ", ", values[1]);
    }
    const LayerResult result = rank.tensors();
    const std::string wrong =
        values[0] == 0 ? difference(result, want) : values_of_fault(result, main_grad);
    if (!wrong.empty()) return cat(wrong, ", overflow ", values[0]);
  }
  return "same";
}

TEST_P(CudaOverflow, AnOverflowIsAValueOnTheDevice) {
  expect_same(on_gpus(ranks(), [](const Communicator& c) -> std::string {
    const LayerData first = fitting_batch(c.size());
    const Problem problem = problem_of(first, c.size(), kCapacity);
    const DeviceTensor<std::int64_t> overflow(2);
    for (const bool main_grad : {false, true}) {
      for (const bool in_two : {false, true}) {
        for (const Schedule& schedule : cuda_schedules()) {
          const LayerBlocks blocks(needs_of(problem, c.size()));
          GpuRank rank(first, c, {.memory = blocks.memory()},
                       {.capacity_rows = kCapacity, .main_grad = main_grad});
          const MovableStep kept(blocks.needs, problem);
          const auto step = [&] {
            forward(rank.layer(), rank, kept, schedule, {}, overflow.span().data());
            if (!in_two) return backward(rank.layer(), rank, kept, schedule, {}, true);
            Saved saved = rank.layer().restore(kept.memory(false), rank.tokens(), true);
            rank.layer().backward_data(saved, data_args(rank.backward_args()),
                                       {.schedule = schedule, .memory = kept.memory()});
            rank.layer().backward_weights(saved, weights_args(rank.backward_args()), schedule);
          };
          const auto said = steps_with_overflow(c, rank, main_grad, overflow, step);
          if (said != "same") {
            return cat(said, ", main_grad ", main_grad, ", in_two ", in_two, ", ",
                       to_string(schedule));
          }
        }
      }
    }
    return "same";
  }));
}

/// Nothing that is asked of them throws.
TEST_P(CudaOverflow, PlansOfItSayThatTheyHaveNoRows) {
  expect_same(on_gpus(ranks(), [](const Communicator& c) -> std::string {
    GpuRank rank(overflowing_batch(c.size()), c, {}, {.capacity_rows = kCapacity});
    const DeviceTensor<std::int64_t> overflow(2);
    const RoutingPlan plan =
        rank.layer().plan(rank.topk_ids(), {.overflow = overflow.span().data()});
    const Saved saved = rank.layer().forward(plan, rank.forward_args());
    if (rank.layer().last_pass().pulled_bytes_no_dedup != 0) return "the pass moved rows";
    if (plan.traffic().rows != 0 || plan.padded_rows() != 0) return "the plan has rows";
    if (plan.received_tokens() != 0 || !plan.row_origin().empty()) return "the plan has tokens";
    if (plan.tokens() != rank.tokens()) return "the rank has other tokens";
    for (const std::int32_t id : plan.topk_ids()) {
      if (id != -1) return cat("a slot has expert ", id);
    }
    return plan.topk_ids().size() == rank.topk_ids().size() ? "same" : "slots are missing";
  }));
}

/// Passes of it do nothing, and so would say nothing of schedules.
TEST_P(CudaOverflow, ASearchOnOneIsRefused) {
  expect_same(on_gpus(ranks(), [](const Communicator& c) -> std::string {
    GpuRank rank(overflowing_batch(c.size()), c, {}, {.capacity_rows = kCapacity});
    const DeviceTensor<std::int64_t> overflow(2);
    const RoutingPlan plan =
        rank.layer().plan(rank.topk_ids(), {.overflow = overflow.span().data()});
    try {
      (void)tune_forward(rank.layer(), plan, rank.forward_args(), {.store = false});
      return "it was run";
    } catch (const Error& error) {
      return error.code() == ErrorCode::kCapacity ? "same" : error.what();
    }
  }));
}

// ---- As errors

/// Memory that is too small for the capacity is compared with the plan's rows. A routing that has
/// none is no refusal then, which would end the layer: the ranks that have more go on, too.
TEST_P(CudaOverflow, ForwardInMemoryOfFewRowsThrowsItAndTheLayerGoesOn) {
  expect_same(on_gpus(ranks(), [](const Communicator& c) -> std::string {
    const LayerData fits = fitting_batch(c.size()), does_not = overflowing_batch(c.size());
    const LayerResult want = GpuRank(fits, c).step(cuda_schedules()[0]);
    GpuRank rank(does_not, c, {}, {.capacity_rows = kCapacity});
    const Problem problem = rank.layer().problem();
    MemoryNeeds needs = needs_of(problem, c.size());
    if (c.rank() == 0) needs.rows = problem.row_align, needs.rows_of_x = needs.rows;
    const MovableStep few(needs, problem);
    const std::string said = failure_of(
        [&] {
          forward(rank.layer(), rank, few, cuda_schedules()[0], {}, nullptr);
          rank.layer().synchronize();
        },
        milliseconds(kLimitMs));
    if (said.find("capacity_rows") == std::string::npos) return cat("said: ", said);
    rank.load(fits);
    const std::string tensor = difference(rank.step(cuda_schedules()[0]), want);
    return tensor.empty() ? "same" : cat(tensor, " differs");
  }));
}

/// Who asks a plan hears of its fault, and not again from the layer.
TEST_P(CudaOverflow, WhatAnAccessorHasThrownIsNotThrownAgain) {
  expect_same(on_gpus(ranks(), [](const Communicator& c) -> std::string {
    GpuRank rank(overflowing_batch(c.size()), c, {}, {.capacity_rows = kCapacity});
    for (int time = 0; time < 2; ++time) {
      const RoutingPlan bad = rank.layer().plan(rank.topk_ids());
      const auto said = failure_of([&] { bad.padded_rows(); }, milliseconds(kLimitMs));
      if (said.find("capacity_rows") == std::string::npos) return cat("said: ", said);
      rank.layer().synchronize();
      const RoutingPlan unasked = rank.layer().plan(rank.topk_ids());
      const auto unheard = failure_of([&] { rank.layer().synchronize(); }, milliseconds(kLimitMs));
      if (unheard != said) return cat("of a plan that nobody asked: ", unheard);
    }
    return "same";
  }));
}

/// Layers of one problem may use each other's plans, with their faults.
TEST_P(CudaOverflow, OfAnotherLayersPlanIsThrown) {
  expect_same(on_gpus(ranks(), [](const Communicator& c) -> std::string {
    GpuRank rank(overflowing_batch(c.size()), c, {}, {.capacity_rows = kCapacity});
    Layer other(rank.layer().problem(), c);
    const RoutingPlan bad = rank.layer().plan(rank.topk_ids());
    const auto said =
        failure_of([&] { other.forward(bad, rank.forward_args()); }, milliseconds(kLimitMs));
    return said.find("capacity_rows") != std::string::npos ? "same" : cat("said: ", said);
  }));
}

TEST_P(CudaOverflow, AnOverflowInAReplayIsAValueOnTheDevice) {
  expect_same(on_gpus(ranks(), [](const Communicator& c) -> std::string {
    const LayerData first = fitting_batch(c.size());
    const DeviceTensor<std::int64_t> overflow(2);
    for (const Schedule& schedule : cuda_schedules()) {
      const Stream stream;
      GpuRank rank(first, c, {.cuda_stream = stream.get()}, {.capacity_rows = kCapacity});
      std::optional<RoutingPlan> plan;
      Saved saved;
      const Graph graph(stream, [&] {
        plan = rank.layer().plan(rank.topk_ids(), {.overflow = overflow.span().data()});
        saved = rank.layer().forward(*plan, rank.forward_args(), schedule);
        rank.layer().backward(saved, rank.backward_args(), schedule);
      });
      const auto said = steps_with_overflow(c, rank, false, overflow, [&] { graph.replay(); });
      if (said != "same") return cat(said, ", ", to_string(schedule));
    }
    return "same";
  }));
}

}  // namespace
}  // namespace uniep::testing
