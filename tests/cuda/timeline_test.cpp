// What a pass on a GPU says of itself: the tasks of its schedule in the timeline, and in last_pass
// what they add up to.
#include <gtest/gtest.h>

#include <optional>

#include "base/check.h"
#include "base/cuda/driver.h"
#include "cuda/cuda_schedules.h"
#include "cuda/gpu_rank.h"
#include "group/cuda/cuda_communicator.h"
#include "schedule/pass_order.h"
#include "schedule/queue.h"
#include "support/ran_tasks.h"
#include "workload/split.h"
#include "workload/synthetic.h"

namespace uniep::testing {
namespace {

class CudaTimeline : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!cuda::device_problem(0).empty()) GTEST_SKIP() << cuda::device_problem(0);
    cuda::check_cuda(cudaDeviceGetAttribute(&sms_, cudaDevAttrMultiProcessorCount, 0), "SMs");
    const workload::Split split(data_, 1);
    host_plan_ = RoutingPlan::build(split.problem(), 0, std::vector{data_.tokens}, data_.topk_ids);
  }

  /// Of the last pass, which was this one.
  void expect_reported(GpuRank& rank, Pass pass, PassPart part, const Schedule& schedule) const {
    SCOPED_TRACE(cat(name(pass), ", part ", static_cast<int>(part), ", ", to_string(schedule)));
    rank.layer().synchronize();
    const PassOrder order(host_plan_->data(), pass, schedule, part);
    const std::vector<TimelineEvent> events = rank.layer().take_timeline();
    EXPECT_EQ(tasks_of(events), tasks_of(order.view(), 0));
    for (const TimelineEvent& e : events) {
      EXPECT_EQ(e.pass, pass);
      EXPECT_GT(e.begin_ns, 0);
      EXPECT_LE(e.begin_ns, e.ready_ns);
      EXPECT_LE(e.ready_ns, e.end_ns);
      EXPECT_TRUE(e.processor >= 0 && e.processor < sms_) << e.processor;
    }
    const PassStats& stats = rank.layer().last_pass();
    EXPECT_EQ(stats.pass, pass);
    EXPECT_EQ(stats.launches, num_launches(order.view()));
    EXPECT_EQ(stats.workers, schedule.workers > 0 ? schedule.workers : sms_);
    EXPECT_GT(stats.elapsed_s, 0);
  }

  const LayerData data_ = workload::make_layer(
      workload::parse_shape("custom,tokens=700,hidden=264,intermediate=136,experts=6,topk=3"), 1, 1,
      0.5);
  int sms_ = 0;
  std::optional<RoutingPlan> host_plan_;
};

TEST_F(CudaTimeline, HasTheTasksOfEachPass) {
  GpuRank rank(data_, cuda::single_rank(), {.record_timeline = true});
  rank.plan();
  for (const Schedule& s : cuda_schedules()) {
    rank.forward(s);
    expect_reported(rank, Pass::kForward, PassPart::kWhole, s);
    rank.backward(s);
    expect_reported(rank, Pass::kBackward, PassPart::kWhole, s);
    rank.backward_data(s);
    expect_reported(rank, Pass::kBackward, PassPart::kData, s);
    rank.backward_weights(s);
    expect_reported(rank, Pass::kBackward, PassPart::kWeights, s);
  }
}

}  // namespace
}  // namespace uniep::testing
