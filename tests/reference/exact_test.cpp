#include "reference/exact.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <ostream>
#include <string>

#include "reference/compare.h"
#include "reference/exact_activation.h"
#include "reference/random_layer.h"
#include "support/expect_error.h"

namespace uniep::reference {

static void PrintTo(const RandomLayer& spec, std::ostream* os) { *os << "seed " << spec.seed; }

namespace {

double loss(const Inputs<double>& forward_only, const std::vector<double>& dy) {
  const auto out = exact(forward_only).out;
  return std::inner_product(out.begin(), out.end(), dy.begin(), 0.0);
}

// Central differences of the loss by every element of `variable`, a member of `in`.
std::vector<double> differences(Inputs<double> in, std::vector<double> Inputs<double>::*variable) {
  constexpr double kStep = 1e-5;
  const std::vector<double> dy = std::move(in.dy);
  in.dy.clear();
  std::vector<double> gradient;
  for (double& v : in.*variable) {
    const double centre = v;
    v = centre + kStep;
    const double above = loss(in, dy);
    v = centre - kStep;
    const double below = loss(in, dy);
    v = centre;
    gradient.push_back((above - below) / (2 * kStep));
  }
  return gradient;
}

void expect_differences(const Inputs<double>& in) {
  constexpr double kTolerance = 1e-8;
  const auto result = exact(in);
  const auto expect_near = [&](const char* name, const std::vector<double>& gradient,
                               std::vector<double> Inputs<double>::*variable) {
    EXPECT_LT(relative_l2(gradient, differences(in, variable)), kTolerance) << name;
  };
  expect_near("dx", result.dx, &Inputs<double>::x);
  expect_near("dprobs", result.dprobs, &Inputs<double>::topk_probs);
  expect_near("dw1", result.dw1, &Inputs<double>::w1);
  expect_near("dw2", result.dw2, &Inputs<double>::w2);
  expect_near("db1", result.db1, &Inputs<double>::b1);
  expect_near("db2", result.db2, &Inputs<double>::b2);
}

class Gradients : public ::testing::TestWithParam<RandomLayer> {};

TEST_P(Gradients, EqualFiniteDifferences) {
  expect_differences(widen<double>(make_layer(GetParam())));
}

// No element of these layers' h lies within a difference's step of a kink or limit, which a
// gradient that is off by more than the tolerance would show.
TEST(Gradients, OfEveryActivationEqualFiniteDifferences) {
  for (int activation = 0; activation < kNumActivations; ++activation) {
    for (const Probs probs : {Probs::kBefore, Probs::kAfter}) {
      for (const bool bias : {false, true}) {
        RandomLayer spec{.dropped = 0.2, .idle_expert = 1, .seed = 9};
        spec.activation = static_cast<Activation>(activation);
        spec.probs = probs;
        spec.bias = bias;
        const double limit = reference::exact_activations::limit_of(spec.activation);
        spec.scale_of_h = std::isfinite(limit) ? limit - 1 : 1;
        SCOPED_TRACE(std::string(name(spec.activation)) + ", probs " + name(probs) +
                     (bias ? ", biases" : ""));
        expect_differences(widen<double>(make_layer(spec)));
      }
    }
  }
}

TEST(Gradients, OfProbabilitiesThatAreZeroEqualFiniteDifferences) {
  for (const Probs probs : {Probs::kBefore, Probs::kAfter}) {
    LayerData layer = make_layer({.seed = 10, .probs = probs, .bias = true});
    layer.topk_probs[3] = 0;
    layer.topk_probs[4] = 0;
    SCOPED_TRACE(name(probs));
    expect_differences(widen<double>(layer));
  }
}

TEST(Gradients, WithCombineGroupsEqualFiniteDifferences) {
  for (const CombinePartials partials : {CombinePartials::kFp32, CombinePartials::kBf16}) {
    const RandomLayer spec{.topk = 3,
                           .dropped = 0.2,
                           .seed = 12,
                           .probs = Probs::kAfter,
                           .combine_groups = 2,
                           .combine_partials = partials};
    expect_differences(widen<double>(make_layer(spec)));
  }
}

TEST(Exact, CombineGroupsMakeNoDifferenceInExactArithmetic) {
  LayerData layer = make_layer({.topk = 3, .seed = 13});
  const auto one = exact(layer);
  for (const CombinePartials partials : {CombinePartials::kFp32, CombinePartials::kBf16}) {
    layer.combine_groups = layer.num_experts;
    layer.combine_partials = partials;
    const auto groups = exact(layer);
    EXPECT_LT(relative_l2(groups.out, one.out), 1e-14);
    EXPECT_LT(relative_l2(groups.dx, one.dx), 1e-14);
  }
}

TEST(Exact, PlaceOfProbabilitiesMakesNoDifferenceInExactArithmetic) {
  LayerData layer = make_layer({.seed = 11, .bias = true});
  const auto before = exact(layer);
  layer.probs = Probs::kAfter;
  const auto after = exact(layer);
  EXPECT_LT(relative_l2(after.out, before.out), 1e-14);
  EXPECT_LT(relative_l2(after.dx, before.dx), 1e-14);
  EXPECT_LT(relative_l2(after.dprobs, before.dprobs), 1e-14);
  EXPECT_LT(relative_l2(after.dw1, before.dw1), 1e-14);
  EXPECT_LT(relative_l2(after.dw2, before.dw2), 1e-14);
  EXPECT_LT(relative_l2(after.db1, before.db1), 1e-14);
  EXPECT_LT(relative_l2(after.db2, before.db2), 1e-14);
}

INSTANTIATE_TEST_SUITE_P(
    Layers, Gradients,
    ::testing::Values(RandomLayer{.seed = 1}, RandomLayer{.dropped = 0.3, .seed = 2},
                      RandomLayer{.idle_expert = 2, .seed = 3},
                      RandomLayer{.repeat_expert = true, .seed = 4},
                      RandomLayer{.dropped = 1, .seed = 5}, RandomLayer{.tokens = 0, .seed = 6},
                      RandomLayer{.tokens = 5, .num_experts = 1, .topk = 1, .seed = 7},
                      RandomLayer{
                          .tokens = 9, .topk = 4, .dropped = 0.2, .idle_expert = 0, .seed = 8}));

TEST(Exact, AnExpertWithoutRowsHasZeroGradients) {
  const auto layer = make_layer({.idle_expert = 3});
  const auto result = exact(layer);
  const auto quarter = static_cast<std::ptrdiff_t>(result.dw1.size() / 4);
  EXPECT_EQ(std::vector<double>(result.dw1.end() - quarter, result.dw1.end()),
            std::vector<double>(static_cast<std::size_t>(quarter)));
}

TEST(Exact, NoTokensGiveZeroWeightGradients) {
  const auto layer = make_layer({.tokens = 0});
  const auto result = exact(layer);
  EXPECT_TRUE(result.out.empty());
  EXPECT_TRUE(result.dx.empty());
  EXPECT_TRUE(result.dprobs.empty());
  EXPECT_EQ(result.dw1, std::vector<double>(layer.w1.size()));
  EXPECT_EQ(result.dw2, std::vector<double>(layer.w2.size()));
}

TEST(Exact, WithoutDyOnlyTheForwardPassIsComputed) {
  auto layer = make_layer({});
  const auto both = exact(layer);
  layer.dy.clear();
  const auto forward = exact(layer);
  EXPECT_EQ(forward.out, both.out);
  EXPECT_TRUE(forward.dx.empty());
  EXPECT_TRUE(forward.dprobs.empty());
  EXPECT_TRUE(forward.dw1.empty());
}

void expect_refused(const LayerData& layer, const std::string& sentence) {
  uniep::testing::expect_invalid(sentence, [&] { exact(layer); });
}

TEST(Exact, NamesTheIdThatIsNoExpert) {
  auto layer = make_layer({});
  layer.topk_ids[5] = 4;
  expect_refused(layer, "topk_ids[2, 1] is 4; -1 (dropped) to 3 are accepted");
  layer.topk_ids[5] = -2;
  expect_refused(layer, "topk_ids[2, 1] is -2; -1 (dropped) to 3 are accepted");
}

TEST(Exact, NamesTheTensorOfTheWrongSize) {
  auto layer = make_layer({});
  layer.w2.pop_back();
  expect_refused(layer, "w2 has 95 elements; the layer's shape asks for 96");
  layer = make_layer({.bias = true});
  layer.b1.clear();
  expect_refused(layer, "b1 has 0 elements; the layer's shape asks for 32");
  layer = make_layer({});
  layer.activation = Activation::kRelu2;
  expect_refused(layer, "w1 has 192 elements; the layer's shape asks for 96");
}

}  // namespace
}  // namespace uniep::reference
