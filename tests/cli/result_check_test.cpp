#include "run/result_check.h"

#include <gtest/gtest.h>

#include <cmath>
#include <span>
#include <sstream>

#include "base/check.h"
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

/// A run that comes to this, whatever it is asked for.
StepRunner returns(const LayerResult& result) {
  return [result](const LayerData&, const StepOptions&) {
    StepReport report;
    report.result = result;
    return report;
  };
}

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
  TensorCheck check{.name = "out", .relative_l2 = std::nan(""), .limit = 1};
  EXPECT_FALSE(check.ok());
  check.limit = 0.01;
  check.relative_l2 = 0.02;
  EXPECT_TRUE(verdict({check}).starts_with("FAILED: out is 2.00e-02 from float64"))
      << verdict({check});
}

// The limit follows from the layer: neither a small one nor an uneven one is refused, and an error
// of a few roundings is.
TEST(Check, TakesEveryRightLayerHoweverSmall) {
  for (unsigned seed = 1; seed <= 300; ++seed) {
    const int size = 8 * static_cast<int>(1 + seed % 3);
    const auto shape = workload::parse_shape(cat("custom,tokens=", 1 + seed % 2, ",hidden=", size,
                                                 ",intermediate=", 8 * (1 + seed % 4),
                                                 ",experts=", 1 + seed % 4, ",topk=1"));
    const LayerData layer = workload::make_layer(shape, 1, seed, 0);
    StepOptions options;
    options.ranks = 1;
    options.main_grad = seed % 5 == 0;
    const auto checks = check_result(layer, run_steps(layer, options).result, options);
    EXPECT_TRUE(all_ok(checks)) << "seed " << seed << ": " << verdict(checks);
    EXPECT_LT(checks[0].limit, 0.1) << "seed " << seed;
  }
}

// Thousands of elements, whose errors come from the roundings of a few numbers.
TEST(Check, TakesEveryRightLayerHoweverWide) {
  for (unsigned seed = 1; seed <= 60; ++seed) {
    const auto shape =
        workload::parse_shape("custom,tokens=1,hidden=4096,intermediate=8,experts=1,topk=1");
    const LayerData layer = workload::make_layer(shape, 1, seed, 0);
    StepOptions options;
    options.ranks = 1;
    const auto checks = check_result(layer, run_steps(layer, options).result, options);
    EXPECT_TRUE(all_ok(checks)) << "seed " << seed << ": " << verdict(checks);
    EXPECT_LT(checks[0].limit, 0.1) << "seed " << seed;
  }
}

TEST(Check, FindsAnErrorOfEveryElementThatHasNoOtherCause) {
  const Checked c;
  LayerResult wrong = c.result;
  for (bf16& v : wrong.dw1) v = to_bf16(1.02f * to_float(v));
  // The same mistake in both, so that only float64 tells.
  const auto checks = check_result(c.layer, wrong, c.options, returns(wrong));
  EXPECT_FALSE(all_ok(checks));
  EXPECT_TRUE(verdict(checks).starts_with("FAILED: dw1 is 2.")) << verdict(checks);
}

TEST(Check, AnOverflowOfTheReferenceIsNoError) {
  Checked c;
  const auto one_token = std::span(c.layer.x).first(static_cast<std::size_t>(c.layer.hidden));
  for (bf16& v : one_token) v = to_bf16(3e38f);
  c.result = run_steps(c.layer, c.options).result;
  const auto checks = check_result(c.layer, c.result, c.options);
  EXPECT_TRUE(all_ok(checks)) << verdict(checks);
  EXPECT_GT(checks[0].overflows, 0);
  EXPECT_NE(verdict(checks).find("not finite: out"), std::string::npos) << verdict(checks);

  // One more than the reference has.
  for (bf16& v : c.result.out) v = to_bf16(INFINITY);
  const auto more = check_result(c.layer, c.result, c.options, returns(c.result));
  EXPECT_FALSE(all_ok(more));
}

TEST(Check, OfZerosAloneNothingMayDiffer) {
  Checked c;
  std::ranges::fill(c.layer.topk_ids, -1);
  const LayerResult zeros = run_steps(c.layer, c.options).result;
  for (const TensorCheck& check : check_result(c.layer, zeros, c.options)) {
    EXPECT_TRUE(std::isfinite(check.limit)) << check.name;
    EXPECT_TRUE(check.ok()) << check.name;
  }
  LayerResult wrong = zeros;
  wrong.out[3].bits = 0x3f80;
  // Run and baseline share the error, which float64 alone can tell.
  EXPECT_FALSE(all_ok(check_result(c.layer, wrong, c.options, returns(wrong))));
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
