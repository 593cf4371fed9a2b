// What fits say of themselves, on times that no formula meets.
#include "tune/model/profile_fit.h"

#include <gtest/gtest.h>

namespace uniep::tune {
namespace {

TEST(FitMoves, SaysHowFarItIsFromWhatWasMeasured) {
  std::vector<FitReport> reports;
  const MoveCost cost = fit_moves("dispatch", {{{1, 0, 0}, 1}, {{1, 0, 0}, 3}}, reports);
  EXPECT_NEAR(cost.fixed, 1.2, 1e-9);  // (1 + 1/3) / (1 + 1/9)
  ASSERT_EQ(reports.size(), 1u);
  EXPECT_EQ(reports[0].what, "dispatch");
  EXPECT_EQ(reports[0].samples, 2u);
  EXPECT_NEAR(reports[0].mean_error, 0.4, 1e-9);
  EXPECT_NEAR(reports[0].worst_error, 0.6, 1e-9);
  EXPECT_EQ(reports[0].result, "1.2");
}

TEST(FitByte, IsTheLineOfLeastRelativeErrors) {
  std::vector<FitReport> reports;
  // 5/9 + 1/3 a byte; of absolute errors it would be 1/3 + 1/2 a byte.
  EXPECT_NEAR(fit_byte("pulls", {{1, 1}, {2, 1}, {3, 2}}, reports), 1.0 / 3, 1e-9);
  ASSERT_EQ(reports.size(), 1u);
  EXPECT_EQ(reports[0].samples, 3u);
  EXPECT_NEAR(reports[0].mean_error, 5.0 / 27, 1e-9);
  EXPECT_NEAR(reports[0].worst_error, 2.0 / 9, 1e-9);
}

}  // namespace
}  // namespace uniep::tune
