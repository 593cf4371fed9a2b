// The lab of `uniep profile --backend cuda`, on the CPU: that layers change between alone and
// together, and that what it reports is of the pass that was asked for.
#include "profile/device_lab.h"

#include <gtest/gtest.h>

#include "schedule/pass_order.h"
#include "schedule/queue.h"
#include "tune/lab/timeline_samples.h"

namespace uniep::tool {
namespace {

constexpr const char* kShape = "custom,tokens=24,hidden=32,intermediate=16,experts=4,topk=2";

std::int64_t tasks_of(const PassView& v, Stage stage) {
  std::int64_t tasks = 0;
  for (int i = 0; i < num_launches(v); ++i) {
    const Launch launch = launch_at(v, i);
    for (const TrackList& tracks : {launch.comm, launch.main}) {
      for_each_block(v, tracks, [&](const QueueBlock& b) {
        if (b.stage == stage) tasks += grid_tasks(v, stage, block_grid(v, stage, b.block));
      });
    }
  }
  return tasks;
}

void expect_every_task(DeviceLab& lab, Pass pass, const Schedule& schedule) {
  const tune::LabPass timed = lab.run(pass, schedule, 2);
  EXPECT_GT(timed.elapsed_s, 0);
  EXPECT_GT(timed.workers, 0);
  const PassOrder order(lab.plan(), pass, schedule);
  for (int i = 0; i < kNumStages; ++i) {
    const auto stage = static_cast<Stage>(i);
    const auto samples = tune::task_samples(order.view(), stage, timed.events);
    EXPECT_EQ(static_cast<std::int64_t>(samples.size()), tasks_of(order.view(), stage))
        << name(pass) << ' ' << name(stage);
  }
}

TEST(DeviceLab, RunsLayersAloneAndTogether) {
  run_ranks(Communicator::cpu_group(2), [](Communicator& member) {
    const auto device = cpu_bench_device();
    DeviceLab lab(member, Communicator::cpu_group(1)[0], *device);
    EXPECT_EQ(lab.ranks(), 2);
    for (const bool together : {true, false, true}) {
      lab.set_up(kShape, together);
      EXPECT_EQ(lab.plan().num_ranks(), together ? 2 : 1);
      EXPECT_EQ(lab.plan().num_local_experts, together ? 2 : 4);
      for (const char* text : {"sequential", "single,workers=2,dispatch_workers=1"}) {
        const Schedule schedule = parse_schedule(text);
        expect_every_task(lab, Pass::kForward, schedule);
        expect_every_task(lab, Pass::kBackward, schedule);
      }
    }
    const std::vector<double> all = lab.gather(member.rank() + 0.5);
    EXPECT_EQ(all, (std::vector<double>{0.5, 1.5}));
  });
}

}  // namespace
}  // namespace uniep::tool
