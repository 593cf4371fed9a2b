#include "check.h"

#include <gtest/gtest.h>

#include <cmath>
#include <sstream>

#include "workload/synthetic.h"

namespace uniep::tool {
namespace {

/// A small layer and what a run of it gives.
struct Checked {
  LayerData layer = workload::make_layer(workload::parse_shape("tiny"), 1, 1, 0);
  StepOptions options = two_ranks();
  LayerResult result = run_steps(layer, options).result;

  static StepOptions two_ranks() {
    StepOptions options;
    options.ranks = 2;
    return options;
  }
};

TEST(Check, FindsNothingWhereAllIsRight) {
  const Checked c;
  const auto checks = check_result(c.layer, c.result, c.options);
  EXPECT_EQ(checks.size(), 5u);
  EXPECT_TRUE(all_ok(checks));
  EXPECT_TRUE(verdict(checks).starts_with("PASSED: out dx dprobs dw1 dw2 ")) << verdict(checks);
}

TEST(Check, FindsASingleBit) {
  Checked c;
  c.result.dx[17].bits ^= 1;
  const auto checks = check_result(c.layer, c.result, c.options);
  EXPECT_FALSE(all_ok(checks));
  EXPECT_EQ(checks[1].name, "dx");
  EXPECT_EQ(checks[1].differing, 1);
  EXPECT_EQ(checks[1].first_differs, 17);
  EXPECT_TRUE(verdict(checks).starts_with("FAILED: dx differs in 1 of ")) << verdict(checks);

  std::ostringstream table;
  print_checks(table, checks);
  EXPECT_NE(table.str().find("DIFFERS"), std::string::npos);
}

TEST(Check, RefusesNaNsHoweverTheyCompare) {
  TensorCheck check;
  check.name = "out";
  check.relative_l2 = std::nan("");
  EXPECT_FALSE(check.ok());
  check.relative_l2 = 2 * kMaxRelativeL2;
  EXPECT_EQ(verdict({check}), "FAILED: out is 2.00e-02 from float64");
}

TEST(Check, ComparesMainGrad) {
  Checked c;
  c.options.main_grad = true;
  c.result = run_steps(c.layer, c.options).result;
  EXPECT_TRUE(all_ok(check_result(c.layer, c.result, c.options)));
  c.result.main_dw2[3] += 1;
  const auto checks = check_result(c.layer, c.result, c.options);
  EXPECT_EQ(checks[4].differing, 1);
}

}  // namespace
}  // namespace uniep::tool
