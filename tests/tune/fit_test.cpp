#include "tune/model/fit.h"

#include <gtest/gtest.h>

#include <cmath>

namespace uniep::tune {
namespace {

TEST(FitCosts, FindsTheCoefficientsOfExactTimes) {
  const std::vector<double> truth = {2e-6, 3e-11, 0, 5e-10};
  std::vector<Observation> observations;
  for (int i = 1; i <= 30; ++i) {
    const double m = 16 * (1 + i % 8), n = 64 * (1 + i % 3), k = 100 + 70 * i;
    Observation o{{1, m * n * k, m * k, n * k}};
    for (std::size_t c = 0; c < truth.size(); ++c) o.seconds += truth[c] * o.sizes[c];
    observations.push_back(o);
  }
  const std::vector<double> found = fit_costs(observations);
  for (const Observation& o : observations) {
    double seconds = 0;
    for (std::size_t c = 0; c < found.size(); ++c) seconds += found[c] * o.sizes[c];
    EXPECT_NEAR(seconds, o.seconds, 1e-3 * o.seconds);
  }
  EXPECT_NEAR(found[1], truth[1], 0.02 * truth[1]);
}

TEST(FitCosts, NoCoefficientIsBelowZero) {
  // A straight line that falls: the best that does not is level.
  const std::vector<double> found = fit_costs({{{1, 1}, 3}, {{1, 2}, 2}, {{1, 3}, 1}});
  // At the least squares of relative errors, (1/3 + 1/2 + 1) / (1/9 + 1/4 + 1).
  EXPECT_NEAR(found[0], 66.0 / 49, 1e-9);
  EXPECT_EQ(found[1], 0);
}

TEST(FitCosts, WhatIsAlwaysZeroCostsNothing) {
  EXPECT_EQ(fit_costs({{{2, 0}, 4}, {{3, 0}, 6}})[1], 0);
  EXPECT_TRUE(fit_costs({}).empty());
}

}  // namespace
}  // namespace uniep::tune
