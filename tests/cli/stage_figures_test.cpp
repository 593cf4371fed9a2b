#include "stage_figures.h"

#include <gtest/gtest.h>

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
