#include "run/stage_figures.h"

#include <gtest/gtest.h>

#include "trace/made_up_run.h"

namespace uniep::tool {
namespace {

PassStats stats(double fc1_busy_s, std::int64_t pushed) {
  PassStats s;
  s[Stage::kFc1].tasks = 2;
  s[Stage::kFc1].busy_s = fc1_busy_s;
  s.pushed_bytes = pushed;
  return s;
}

TEST(StageFigures, SumAndMaximumAreOverRanksInEachStep) {
  PassRecord record{
      Pass::kForward, {1, 1}, {{stats(1, 10), stats(3, 20)}, {stats(5, 10), stats(1, 20)}}};
  const auto figures = stage_figures(record);
  ASSERT_EQ(figures.size(), 1u) << "stages that did nothing are left out";
  EXPECT_EQ(figures[0].stage, Stage::kFc1);
  EXPECT_EQ(figures[0].tasks, 4);
  EXPECT_EQ(figures[0].busy_s.sum, (std::vector<double>{4, 6}));
  EXPECT_EQ(figures[0].busy_s.max, (std::vector<double>{3, 5}));
  EXPECT_EQ(wire_figures(record).pushed, 30);
}

TEST(TimeFigures, AreOfTheWorstRankAndOfAllProcessors) {
  StepReport report;
  EXPECT_FALSE(time_figures(report, Pass::kForward)) << "no timeline";
  // Each worker: dispatch, fc1, fc2, reduce; 5 us of waiting, 18 of work and 2 for the link.
  report.timeline = trace::MadeUpRun{.ranks = 2, .workers = 3}.timeline();
  report.timeline[1] = trace::MadeUpRun{.workers = 1, .wait_ns = 15'000}.timeline()[0];
  EXPECT_FALSE(time_figures(report, Pass::kBackward)) << "no such tasks";
  const auto time = time_figures(report, Pass::kForward);
  ASSERT_TRUE(time);
  EXPECT_NEAR(time->exposed_s, (18 + 4 * 17) * 1e-6, 1e-12);
  EXPECT_NEAR(time->tail_s, 0, 1e-12);
  const double total = 3 * 100 + 140;
  EXPECT_NEAR(time->of(Stage::kDispatch), 4 * 18 / total, 1e-9);
  EXPECT_NEAR(time->of(Stage::kFc1), 4 * 18 / total, 1e-9);
  EXPECT_NEAR(time->waiting, (3 * 28 + 68) / total, 1e-9);
  EXPECT_NEAR(time->idle, 0, 1e-9);
}

TEST(LoadFigures, CountsAllExperts) {
  StepReport report;
  report.rows_per_expert = {4, 0, 1, 3};
  report.traffic = {{.rows = 4, .remote_rows = 1, .remote_pulls = 1},
                    {.rows = 4, .remote_rows = 2, .remote_pulls = 1}};
  const LoadFigures load = load_figures(report);
  EXPECT_EQ(load.rows, 8);
  EXPECT_EQ(load.remote_rows, 3);
  EXPECT_EQ(load.min, 0);
  EXPECT_EQ(load.max, 4);
  EXPECT_DOUBLE_EQ(load.median, 2);
  EXPECT_DOUBLE_EQ(load.mean, 2);
}

}  // namespace
}  // namespace uniep::tool
