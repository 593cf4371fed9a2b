#include <gtest/gtest.h>

#include <string>

#include "reference/compare.h"
#include "reference/contract.h"
#include "reference/exact.h"
#include "reference/tensor_file.h"

namespace uniep::reference {
namespace {

// The file's results are float64 ones written as fp32, so the distance is that one rounding's.
TEST(Fixture, ExactEqualsAnIndependentProgram) {
  const std::string dir = UNIEP_FIXTURE_DIR;
  const auto got = exact(TensorFile(dir + "/fixture_layer.safetensors").layer());
  const TensorFile want(dir + "/fixture_result.safetensors");
  constexpr double kRounding = 6e-8;  // 2^-24
  EXPECT_LT(relative_l2(got.out, to_double(want.tensor<float>("out"))), kRounding);
  EXPECT_LT(relative_l2(got.dx, to_double(want.tensor<float>("dx"))), kRounding);
  EXPECT_LT(relative_l2(got.dprobs, to_double(want.tensor<float>("dprobs"))), kRounding);
  EXPECT_LT(relative_l2(got.dw1, to_double(want.tensor<float>("dw1"))), kRounding);
  EXPECT_LT(relative_l2(got.dw2, to_double(want.tensor<float>("dw2"))), kRounding);
}

// On a real layer the roundings of the contract cost 2.5e-3 to 3.4e-3, tensor by tensor, in a
// float64 emulation of them.
TEST(RealTrace, ContractLiesWhereItsRoundingsPutIt) {
  const auto layer = TensorFile(std::string(UNIEP_DATA_DIR) + "/moe_lm_layer.safetensors").layer();
  const auto got = contract(layer);
  const auto want = exact(layer);
  const auto expect_error = [](const char* tensor, const std::vector<double>& is,
                               const std::vector<double>& should_be) {
    const double error = relative_l2(is, should_be);
    EXPECT_GT(error, 2.4e-3) << tensor;
    EXPECT_LT(error, 3.5e-3) << tensor;
  };
  expect_error("out", to_double(got.out), want.out);
  expect_error("dx", to_double(got.dx), want.dx);
  expect_error("dprobs", to_double(got.dprobs), want.dprobs);
  expect_error("dw1", to_double(got.dw1), want.dw1);
  expect_error("dw2", to_double(got.dw2), want.dw2);
}

}  // namespace
}  // namespace uniep::reference
