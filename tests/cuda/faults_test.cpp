// Faults in the protocol, on one GPU: delays and counters that wrap change no bit, and a signal
// that never comes ends the wait for it with all its numbers.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <tuple>

#include "base/check.h"
#include "base/cuda/driver.h"
#include "cuda/cuda_schedules.h"
#include "cuda/emulated_group.h"
#include "cuda/gpu_rank.h"
#include "group/cuda/cuda_communicator.h"
#include "schedule/queue_table.h"
#include "support/cases.h"
#include "support/expect_same.h"
#include "workload/split.h"
#include "workload/synthetic.h"

namespace uniep::cuda::testing {
namespace {

using uniep::testing::cuda_schedules;
using uniep::testing::GpuRank;

constexpr int kRanks = 3;
constexpr int kCulprit = 1;
constexpr int kLimitMs = 300;

/// More than one column tile in every GEMM but dfc2, and rows of all ranks in every expert.
LayerData small_layer(int ranks) {
  return workload::make_layer(
      workload::parse_shape("custom,tokens=90,hidden=264,intermediate=136,experts=6,topk=2"), ranks,
      1, 0.5);
}

Schedule sequential() { return cuda_schedules()[0]; }

class CudaFaults : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!device_problem(0).empty()) GTEST_SKIP() << device_problem(0);
  }
};

// ---- What must not show

LayerResult emulated_step(const LayerData& data, const FaultInjection& faults,
                          const Schedule& schedule) {
  EmulatedGroup group(data, workload::even_parts(data.tokens, kRanks), false, 0,
                      faults.first_count);
  group.inject(faults);
  return group.step(schedule);
}

/// The presets in turn, then points of the space.
Schedule some_schedule(unsigned seed, const Problem& problem) {
  const std::vector<Schedule> presets = cuda_schedules();
  if (seed <= presets.size()) return presets[seed - 1];
  uniep::testing::Rng rng(seed);
  return uniep::testing::random_cuda_schedule(rng, problem);
}

TEST_F(CudaFaults, DelaysOfEmulatedRanksChangeNoBit) {
  const LayerData data = small_layer(kRanks);
  const Problem problem = workload::Split(data, kRanks).problem();
  const LayerResult want = emulated_step(data, {}, sequential());
  for (unsigned seed = 1; seed <= static_cast<unsigned>(uniep::testing::cases(40)); ++seed) {
    const Schedule schedule = some_schedule(seed, problem);
    const LayerResult got = emulated_step(data, {.max_delay_us = 40, .seed = seed}, schedule);
    uniep::testing::expect_same_bits(got, want, cat("seed ", seed, ", ", to_string(schedule)));
  }
}

TEST_F(CudaFaults, CountersOfEmulatedRanksMayWrap) {
  const LayerData data = small_layer(kRanks);
  const LayerResult want = emulated_step(data, {}, sequential());
  for (const Schedule& schedule : cuda_schedules()) {
    // The last `published`, row and column tile before the wrap, and the last rows times columns.
    for (const std::uint32_t left : {1u, 2u, 3u, 100u, 5000u}) {
      const FaultInjection faults{.first_count = 0u - left};
      uniep::testing::expect_same_bits(emulated_step(data, faults, schedule), want,
                                       cat(left, " to the wrap, ", to_string(schedule)));
    }
  }
}

TEST_F(CudaFaults, DelaysAndWrapsChangeNoBitUnderAnySchedule) {
  const LayerData data = small_layer(1);
  const LayerResult want = GpuRank(data, single_rank()).step(sequential());
  for (const Schedule& schedule : cuda_schedules()) {
    for (unsigned seed = 1; seed <= static_cast<unsigned>(uniep::testing::cases(20)); ++seed) {
      const FaultInjection faults{.max_delay_us = 40, .seed = seed, .first_count = 0u - 7 * seed};
      GpuRank rank(data, single_rank(), {.fault_injection = faults});
      for (int step = 0; step < 2; ++step) {
        uniep::testing::expect_same_bits(
            rank.step(schedule), want,
            cat("seed ", seed, ", step ", step, ", ", to_string(schedule)));
      }
    }
  }
}

// ---- A signal that never comes

struct Withheld {
  Pass pass;
  Stage stage;    // whose signals are withheld
  Stage waiting;  // the first stage to notice
};

constexpr Withheld kWithheld[] = {{Pass::kForward, Stage::kDispatch, Stage::kFc1},
                                  {Pass::kForward, Stage::kFc1, Stage::kFc2},
                                  {Pass::kForward, Stage::kFc2, Stage::kReduce},
                                  {Pass::kBackward, Stage::kDispatch, Stage::kDfc2},
                                  {Pass::kBackward, Stage::kDfc2, Stage::kDfc1},
                                  {Pass::kBackward, Stage::kDfc1, Stage::kReduce}};

/// The order of one pass on all ranks, as the host computes it.
class AllTasks {
 public:
  AllTasks(const LayerData& data, int ranks, Pass pass, const Schedule& schedule) {
    const workload::Split split(data, ranks);
    std::vector<std::int64_t> tokens;
    for (int r = 0; r < ranks; ++r) tokens.push_back(split.tokens(r).size());
    for (int r = 0; r < ranks; ++r) {
      plans_.push_back(RoutingPlan::build(split.problem(), r, tokens, data.topk_ids));
      orders_.push_back(std::make_unique<PassOrder>(plans_.back().data(), pass, schedule));
    }
  }

  template <class F>
  void for_each(F&& f) const {
    for (const auto& order : orders_) {
      const PassView& v = order->view();
      for (int i = 0; i < uniep::num_launches(v); ++i) {
        for (const TrackList& tracks : {launch_at(v, i).comm, launch_at(v, i).main}) {
          const QueueTable queue(v, tracks);
          for_each_task(v, queue.view(), [&](const Task& task) { f(v, task); });
        }
      }
    }
  }

  /// Every wait of stage `waiting` that the withheld tile leaves short, as an error tells it.
  std::vector<WaitReport> short_waits(const FaultInjection& faults, Stage waiting,
                                      int limit_ms) const {
    std::map<std::tuple<CounterKind, int, std::int64_t>, std::uint32_t> missing;
    for_each([&](const PassView& v, const Task& task) {
      if (v.rank != faults.withhold_rank || task.stage != faults.withhold_stage) return;
      if (task.tile != faults.withhold_tile) return;
      for_each_signal(v, task, [&](const Signal& s) {
        missing[{s.kind, s.rank, s.index}] += s.amount;
      });
    });
    std::vector<WaitReport> waits;
    for_each([&](const PassView& v, const Task& task) {
      if (task.stage != waiting) return;
      for_each_wait(v, task, [&](const Wait& w) {
        const auto it = missing.find({w.kind, v.rank, w.index});
        if (it == missing.end()) return;
        waits.push_back({.rank = v.rank,
                         .stage = name(waiting),
                         .tile = task.tile,
                         .peer = w.peer,
                         .expected = w.expected,
                         .seen = w.expected - it->second,
                         .limit_ms = limit_ms});
      });
    });
    return waits;
  }

 private:
  std::vector<RoutingPlan> plans_;
  std::vector<std::unique_ptr<PassOrder>> orders_;
};

bool same(const WaitReport& a, const WaitReport& b) {
  return a.rank == b.rank && a.stage == b.stage && a.tile == b.tile && a.peer == b.peer &&
         a.expected == b.expected && a.seen == b.seen && a.limit_ms == b.limit_ms;
}

/// `pass` ends with the error of one of the waits.
template <class RunPass>
void expect_one_of(const std::vector<WaitReport>& waits, RunPass&& run_pass) {
  ASSERT_FALSE(waits.empty());
  try {
    run_pass();
    FAIL() << "no error";
  } catch (const Error& error) {
    ASSERT_TRUE(error.wait()) << error.what();
    for (const WaitReport& wait : waits) {
      if (same(wait, *error.wait())) return;
    }
    const WaitReport& w = waits[0];
    FAIL() << error.what() << "; expected, say, rank " << w.rank << ", stage " << w.stage
           << ", tile " << w.tile << ", peer " << w.peer << ", " << w.expected << " and " << w.seen;
  }
}

std::string text(const Withheld& w) {
  return cat(name(w.pass), ": ", name(w.stage), " withholds a tile");
}

TEST_F(CudaFaults, EmulatedRanksReportWithheldSignalsUnderAnySchedule) {
  const LayerData data = small_layer(kRanks);
  for (const Schedule& schedule : cuda_schedules()) {
    for (const Withheld& w : kWithheld) {
      SCOPED_TRACE(cat(text(w), ", ", to_string(schedule)));
      const FaultInjection faults{.withhold_rank = kCulprit, .withhold_stage = w.stage};
      EmulatedGroup group(data, workload::even_parts(data.tokens, kRanks), false, 0);
      if (w.pass == Pass::kBackward) group.run_pass(Pass::kForward, schedule);
      group.inject(faults);
      group.limit_waits(kLimitMs);
      const AllTasks tasks(data, kRanks, w.pass, schedule);
      expect_one_of(tasks.short_waits(faults, w.waiting, kLimitMs),
                    [&] { group.run_pass(w.pass, schedule); });
    }
  }
}

/// A peer that comes late must not take the tokens of this pass for those of the one before.
TEST_F(CudaFaults, ARankThatFailedPublishesNothingMore) {
  const LayerData data = small_layer(kRanks);
  EmulatedGroup group(data, workload::even_parts(data.tokens, kRanks), false, 0);
  group.inject({.withhold_rank = kCulprit, .withhold_stage = Stage::kFc1});
  group.limit_waits(kLimitMs);
  for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
    EXPECT_THROW(group.run_pass(pass, sequential()), Error);
    for (int r = 0; r < kRanks; ++r) EXPECT_EQ(group.published(r), 1u) << name(pass);
  }
}

/// Of a layer whose dispatch is withheld, forward cannot be run first.
bool can_reach(const Withheld& w) {
  return w.pass == Pass::kForward || w.stage != Stage::kDispatch;
}

TEST_F(CudaFaults, ALayerReportsWithheldSignalsUnderAnySchedule) {
  const LayerData data = small_layer(1);
  for (const Schedule& schedule : cuda_schedules()) {
    for (const Withheld& w : kWithheld) {
      if (!can_reach(w)) continue;
      SCOPED_TRACE(cat(text(w), ", ", to_string(schedule)));
      const FaultInjection faults{.withhold_rank = 0, .withhold_stage = w.stage};
      GpuRank rank(data, single_rank(), {.timeout_ms = kLimitMs, .fault_injection = faults});
      const auto start = std::chrono::steady_clock::now();
      expect_one_of(AllTasks(data, 1, w.pass, schedule).short_waits(faults, w.waiting, kLimitMs),
                    [&] { rank.step(schedule); });
      EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
      EXPECT_THROW(rank.plan(), Error) << "the layer is unusable";
    }
  }
}

/// The host goes on before the device has failed, as in training.
TEST_F(CudaFaults, WhatWasOnTheStreamBehindAFailureIsNotDone) {
  const LayerData data = small_layer(1);
  for (const Schedule& schedule : cuda_schedules()) {
    SCOPED_TRACE(to_string(schedule));
    const FaultInjection faults{.withhold_rank = 0, .withhold_stage = Stage::kDfc2};
    GpuRank rank(data, single_rank(), {.timeout_ms = kLimitMs, .fault_injection = faults},
                 {.main_grad = true});
    rank.plan();
    rank.forward(schedule);
    rank.backward_data(schedule);
    rank.backward_weights(schedule);
    EXPECT_THROW(rank.layer().synchronize(), Error);
    const LayerResult left = rank.tensors();
    const auto untouched = [](float v) { return v == GpuRank::kMainGradStart; };
    EXPECT_TRUE(std::ranges::all_of(left.main_dw1, untouched));
    EXPECT_TRUE(std::ranges::all_of(left.main_dw2, untouched));
  }
}

}  // namespace
}  // namespace uniep::cuda::testing
