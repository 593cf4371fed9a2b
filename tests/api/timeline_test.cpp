// What a pass of the CPU backend says of itself: the tasks of its schedule in the timeline, their
// sums in last_pass, and the bytes that its routing moves.
#include <gtest/gtest.h>

#include <vector>

#include "base/check.h"
#include "layer/arguments.h"
#include "schedule/pass_order.h"
#include "schedule/queue.h"
#include "support/layer_group.h"
#include "support/ran_tasks.h"

namespace uniep::testing {
namespace {

void expect_sums(const PassStats& stats, Stage stage, const std::vector<TimelineEvent>& events) {
  constexpr double kRounding = 1e-12;  // of sums in another order, far below a nanosecond
  StageStats sums;
  for (const TimelineEvent& e : events) {
    if (e.stage != stage) continue;
    ++sums.tasks;
    sums.wait_s += 1e-9 * static_cast<double>(e.ready_ns - e.begin_ns);
    sums.link_s += 1e-9 * static_cast<double>(e.link_ns);
    sums.busy_s += 1e-9 * static_cast<double>(e.end_ns - e.ready_ns - e.link_ns);
  }
  EXPECT_EQ(stats[stage].tasks, sums.tasks) << name(stage);
  EXPECT_NEAR(stats[stage].wait_s, sums.wait_s, kRounding) << name(stage);
  EXPECT_NEAR(stats[stage].link_s, sums.link_s, kRounding) << name(stage);
  EXPECT_NEAR(stats[stage].busy_s, sums.busy_s, kRounding) << name(stage);
}

constexpr int kLateRank = 1;

/// Layers that record, of experts with several tiles; one rank is late before waits and signals.
struct Recorded : LayerGroup {
  Recorded() : LayerGroup(plain_layer(2, 40), 2) {
    make_layers([](int rank) {
      LayerOptions options{.record_timeline = true};
      options.fault_injection.max_delay_us = rank == kLateRank ? 100 : 0;
      return options;
    });
    make_plans();
  }

  /// The rank's last pass was this one, and says so.
  void expect_reported(int rank, Pass pass, PassPart part, const Schedule& schedule) {
    SCOPED_TRACE(cat("rank ", rank, ", ", name(pass), ", part ", static_cast<int>(part), ", ",
                     to_string(schedule)));
    const PassOrder order(plan(rank).data(), pass, schedule, part);
    const PassStats& stats = layer(rank).last_pass();
    const std::vector<TimelineEvent> events = layer(rank).take_timeline();
    EXPECT_EQ(tasks_of(events), tasks_of(order.view(), split().experts(rank).begin));
    EXPECT_EQ(stats.pass, pass);
    EXPECT_EQ(stats.launches, num_launches(order.view()));
    EXPECT_EQ(stats.workers, schedule.workers);
    double waited = 0;
    for (int stage = 0; stage < kNumStages; ++stage) {
      expect_sums(stats, static_cast<Stage>(stage), events);
      waited += stats.stages[static_cast<std::size_t>(stage)].wait_s;
    }
    // Weight gradients alone wait for nothing.
    EXPECT_TRUE(waited > 0 || rank != kLateRank || part == PassPart::kWeights);
    for (const TimelineEvent& e : events) {
      EXPECT_EQ(e.pass, pass);
      EXPECT_LE(e.begin_ns, e.ready_ns);
      EXPECT_LE(e.ready_ns + e.link_ns, e.end_ns);
      EXPECT_TRUE(e.worker >= 0 && e.worker < schedule.workers) << e.worker;
    }
  }
};

TEST(Timeline, HasTheTasksOfEachPassAndLastPassTheirSums) {
  for (const char* preset : {"sequential", "pipelined:2", "two-kernel,wgrad=after", "single"}) {
    Recorded group;
    const Schedule s = parse_schedule(cat(preset, ",tile_m=16,tile_n=64,workers=3"));
    group.each([&](int rank) {
      Layer& layer = group.layer(rank);
      group.forward(rank, s);
      group.expect_reported(rank, Pass::kForward, PassPart::kWhole, s);
      group.backward(rank, s);
      group.expect_reported(rank, Pass::kBackward, PassPart::kWhole, s);
      layer.backward_data(group.saved(rank), data_args(group.backward_args(rank)), s);
      group.expect_reported(rank, Pass::kBackward, PassPart::kData, s);
      layer.backward_weights(group.saved(rank), weights_args(group.backward_args(rank)), s);
      group.expect_reported(rank, Pass::kBackward, PassPart::kWeights, s);
    });
    if (::testing::Test::HasFailure()) return;
  }
}

/// Experts 0 and 1 are those of rank 0. It gets tokens 3, 4 and 5, in five rows; rank 1 gets tokens
/// 0 and 1, in three.
LayerData routed_by_hand() {
  LayerData d = plain_layer(2, 3);
  d.topk_ids = {2, 3, 0, 2, 1, -1,  // of rank 0
                0, 1, 1, 1, 3, 0};
  return d;
}
constexpr std::int64_t kRemotePulls[] = {3, 2};
constexpr std::int64_t kRemoteRows[] = {5, 3};
constexpr std::int64_t kTokenBytes = 2 * 72;
constexpr std::int64_t kScalarBytes = 4;  // a row's probability, or its gradient on the way back

TEST(Traffic, IsWhatTheRoutingMovesOverTheWire) {
  for (const bool dedup : {true, false}) {
    LayerGroup group(routed_by_hand(), 2);
    group.make_layers();
    group.make_plans();
    const Schedule s = parse_schedule(cat("sequential,dispatch_wire=", dedup ? "dedup" : "rows"));
    group.each([&](int rank) {
      const PassStats& stats = group.layer(rank).last_pass();
      const std::int64_t rows = kRemoteRows[rank] * kTokenBytes;
      const std::int64_t pulls = dedup ? kRemotePulls[rank] * kTokenBytes : rows;
      const std::int64_t scalars = kRemoteRows[rank] * kScalarBytes;
      group.forward(rank, s);
      EXPECT_EQ(stats.pulled_bytes, pulls + scalars);
      EXPECT_EQ(stats.pulled_bytes_no_dedup, rows + scalars);
      EXPECT_EQ(stats.pushed_bytes, rows);
      group.backward(rank, s);
      EXPECT_EQ(stats.pulled_bytes, pulls);
      EXPECT_EQ(stats.pulled_bytes_no_dedup, rows);
      EXPECT_EQ(stats.pushed_bytes, rows + scalars);
    });
  }
}

}  // namespace
}  // namespace uniep::testing
