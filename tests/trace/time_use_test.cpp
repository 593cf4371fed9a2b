#include "trace/time_use.h"

#include <gtest/gtest.h>

#include <numeric>

#include "trace/made_up_run.h"

namespace uniep::trace {
namespace {

constexpr double kUs = 1e-6;
constexpr double kNear = 1e-12;

double of(const TimeUse& use, Stage stage) { return use.stage_s[static_cast<std::size_t>(stage)]; }

double sum(const TimeUse& use) {
  return std::accumulate(use.stage_s.begin(), use.stage_s.end(), use.waiting_s + use.idle_s);
}

/// A task that is taken at `begin` and busy from `ready` to `end`; microseconds.
TimelineEvent task(Stage stage, int processor, int begin, int ready, int end) {
  TimelineEvent e;
  e.stage = stage;
  e.worker = e.processor = processor;
  e.begin_ns = 1000 * begin;
  e.ready_ns = 1000 * ready;
  e.end_ns = 1000 * end;
  return e;
}

TEST(TimeUse, OneWorkerHidesNothing) {
  // dispatch, fc1, fc2, reduce: 5 us of waiting and 20 of work each, 2 of these for the link.
  const TimeUse use = time_use(MadeUpRun{}.timeline()[0], Pass::kForward);
  EXPECT_EQ(use.processors, 1);
  EXPECT_NEAR(use.span_s, 100 * kUs, kNear);
  for (const Stage stage : {Stage::kDispatch, Stage::kFc1, Stage::kFc2, Stage::kReduce}) {
    EXPECT_NEAR(of(use, stage), 18 * kUs, kNear) << name(stage);
  }
  EXPECT_NEAR(use.waiting_s, 4 * 7 * kUs, kNear);
  EXPECT_NEAR(use.idle_s, 0, kNear);
  EXPECT_NEAR(use.exposed_s, (18 + 4 * 7) * kUs, kNear);
  EXPECT_NEAR(use.tail_s, 0, kNear);
}

TEST(TimeUse, WorkersThatDoTheSameHideNothingEither) {
  const TimeUse one = time_use(MadeUpRun{}.timeline()[0], Pass::kForward);
  const TimeUse many = time_use(MadeUpRun{.workers = 7}.timeline()[0], Pass::kForward);
  EXPECT_EQ(many.processors, 7);
  EXPECT_NEAR(many.exposed_s, one.exposed_s, kNear);
  EXPECT_NEAR(many.waiting_s, 7 * one.waiting_s, kNear);
  EXPECT_NEAR(sum(many), many.total_s(), kNear);
}

TEST(TimeUse, CommunicationBesideAComputingWorkerIsNotExposed) {
  const std::vector<TimelineEvent> events = {task(Stage::kDispatch, 0, 0, 0, 30),
                                             task(Stage::kFc1, 1, 0, 10, 25),
                                             task(Stage::kReduce, 1, 25, 40, 42)};
  const TimeUse use = time_use(events, Pass::kForward);
  // 0 to 10: nobody computes; 10 to 25: hidden; 25 to 40: dispatch, then a wait.
  EXPECT_NEAR(use.exposed_s, (10 + 15) * kUs, kNear);
  EXPECT_NEAR(of(use, Stage::kDispatch), 30 * kUs, kNear);
  EXPECT_NEAR(of(use, Stage::kFc1), 15 * kUs, kNear);
  EXPECT_NEAR(use.waiting_s, 25 * kUs, kNear);
  EXPECT_NEAR(use.idle_s, 12 * kUs, kNear) << "of the first worker, behind its only task";
  EXPECT_NEAR(sum(use), use.total_s(), kNear);
}

TEST(TimeUse, TimeWithoutAnyTaskIsIdleAndNotExposed) {
  const std::vector<TimelineEvent> events = {task(Stage::kFc1, 0, 0, 0, 10),
                                             task(Stage::kFc2, 0, 15, 15, 20)};
  const TimeUse use = time_use(events, Pass::kForward);
  EXPECT_NEAR(use.exposed_s, 0, kNear);
  EXPECT_NEAR(use.idle_s, 5 * kUs, kNear);
}

/// Work, not being taken, is what is shared: the second task is busy first.
TEST(TimeUse, ATaskThatWaitsLongerDoesNotHideAnother) {
  const std::vector<TimelineEvent> events = {task(Stage::kFc1, 0, 0, 30, 50),
                                             task(Stage::kFc1, 0, 5, 10, 20)};
  const TimeUse use = time_use(events, Pass::kForward);
  EXPECT_NEAR(of(use, Stage::kFc1), 30 * kUs, kNear);
  EXPECT_NEAR(sum(use), use.total_s(), kNear);
}

TEST(TimeUse, WorkersOfOneProcessorShareItsTime) {
  std::vector<TimelineEvent> events = {
      task(Stage::kDispatch, 0, 0, 0, 20), task(Stage::kDispatch, 0, 0, 5, 30),
      task(Stage::kFc1, 0, 20, 30, 50), task(Stage::kFc1, 0, 45, 48, 60)};
  events[0].worker = 1;  // two dispatching warps of the SM
  events[1].worker = 2;
  const TimeUse use = time_use(events, Pass::kForward);
  EXPECT_EQ(use.processors, 1);
  EXPECT_NEAR(of(use, Stage::kDispatch), 30 * kUs, kNear);
  EXPECT_NEAR(of(use, Stage::kFc1), 30 * kUs, kNear) << "tasks that overlap count once";
  EXPECT_NEAR(use.waiting_s, 0, kNear) << "it was dispatching meanwhile";
  EXPECT_NEAR(sum(use), use.total_s(), kNear);
}

TEST(TimeUse, TheTailBeginsWhenTheFirstHasNoTasksLeft) {
  const std::vector<TimelineEvent> events = {
      task(Stage::kDispatch, 9, 0, 0, 5),  // dispatches only, and does not count
      task(Stage::kFc1, 0, 0, 0, 40), task(Stage::kFc1, 1, 0, 0, 30),
      task(Stage::kFc1, 2, 0, 0, 35)};
  EXPECT_NEAR(time_use(events, Pass::kForward).tail_s, 10 * kUs, kNear);
}

TEST(TimeUse, EveryLaunchHasATail) {
  std::vector<TimelineEvent> events = {
      task(Stage::kFc1, 0, 0, 0, 40), task(Stage::kFc1, 1, 0, 0, 30),  // a tail of 10
      task(Stage::kFc2, 0, 41, 41, 60)};  // the other worker found no task: 19
  events[2].launch = 1;
  EXPECT_NEAR(time_use(events, Pass::kForward).tail_s, (10 + 19) * kUs, kNear);
}

TEST(TimeUse, PassesAreApart) {
  auto events = MadeUpRun{}.timeline()[0];
  const auto backward = MadeUpRun{.tasks = 8, .pass = Pass::kBackward}.timeline()[0];
  events.insert(events.end(), backward.begin(), backward.end());
  EXPECT_NEAR(time_use(events, Pass::kForward).span_s, 100 * kUs, kNear);
  EXPECT_NEAR(time_use(events, Pass::kBackward).span_s, 200 * kUs, kNear);
  EXPECT_EQ(of(time_use(events, Pass::kForward), Stage::kWgrad2), 0);
}

TEST(TimeUse, TheClockIsThatOfCountedTasks) {
  std::vector<TimelineEvent> events = {task(Stage::kDispatch, 0, 0, 0, 30),
                                       task(Stage::kFc1, 1, 0, 10, 20),
                                       task(Stage::kFc2, 1, 20, 20, 50)};
  EXPECT_EQ(time_use(events, Pass::kForward).clock_hz, 0);
  events[1].cycles = 15'000;
  events[2].cycles = 39'000;
  EXPECT_NEAR(time_use(events, Pass::kForward).clock_hz, 54e3 / 40e-6, 1);
}

TEST(TimeUse, NothingOfNothing) {
  const TimeUse use = time_use({}, Pass::kForward);
  EXPECT_EQ(use.processors, 0);
  EXPECT_EQ(use.span_s + use.exposed_s + use.tail_s + use.clock_hz + sum(use), 0);
}

}  // namespace
}  // namespace uniep::trace
