// Where tensors may start, and how weights may lie; needs no GPU.
#include <gtest/gtest.h>

#include "base/check.h"
#include "cuda/pass.h"
#include "cuda/tensor_alignment.h"
#include "support/expect_error.h"
#include "support/expert_forms.h"

namespace uniep::testing {
namespace {

/// 64 elements from `bytes` behind a multiple of 16 on; never looked at.
template <class T>
std::span<T> at(std::uintptr_t bytes) {
  return {reinterpret_cast<T*>((std::uintptr_t{1} << 20) + bytes), 64};
}

template <class Args>
void expect_refused(const char* name, const Args& args) {
  expect_invalid(cat(name, " starts at address ", (1 << 20) + 8,
                     "; with the cuda backend a multiple of 16 is accepted"),
                 [&] { cuda::check_alignment(args); });
}

TEST(TensorAlignment, RowsStartAtMultiplesOf16Bytes) {
  const ForwardArgs forward{.x = at<const bf16>(0),
                            .topk_probs = at<const float>(4),
                            .w1 = at<const bf16>(16),
                            .w2 = at<const bf16>(32),
                            .out = at<bf16>(48)};
  EXPECT_NO_THROW(cuda::check_alignment(forward));
  for (const auto& [name, tensor] :
       {std::pair("w1", &ForwardArgs::w1), std::pair("w2", &ForwardArgs::w2)}) {
    ForwardArgs args = forward;
    args.*tensor = at<const bf16>(8);
    expect_refused(name, args);
    const std::span<const bf16> each[] = {at<const bf16>(16), at<const bf16>(8)};
    args.*tensor = ExpertMatrices<const bf16>::one_each(each);
    expect_refused(name, args);
  }
  ForwardArgs args = forward;
  args.w1 = ExpertMatrices<const bf16>::gate_and_up(at<const bf16>(16), at<const bf16>(8));
  expect_refused("w1", args);
  args = forward;
  args.x = at<const bf16>(8);
  expect_refused("x", args);
  args = forward;
  args.out = at<bf16>(8);
  expect_refused("out", args);

  const BackwardDataArgs data{.dy = forward.x,
                              .w1 = forward.w1,
                              .w2 = forward.w2,
                              .dx = forward.out,
                              .dprobs = at<float>(4)};
  EXPECT_NO_THROW(cuda::check_alignment(data));
  BackwardDataArgs bad = data;
  bad.dy = at<const bf16>(8);
  expect_refused("dy", bad);
  bad = data;
  bad.dx = at<bf16>(8);
  expect_refused("dx", bad);

  EXPECT_NO_THROW(cuda::check_alignment({.dw1 = at<float>(16), .dw2 = at<bf16>(0)}));
  expect_refused("dw1", BackwardWeightsArgs{.dw1 = at<float>(8), .dw2 = at<bf16>(0)});
  expect_refused("dw2", BackwardWeightsArgs{.dw1 = at<float>(0), .dw2 = at<bf16>(8)});
}

TEST(TensorAlignment, RowsThatAreAddedUpDoToo) {
  const RowSums sums{.tokens = 8,
                     .hidden = 8,
                     .rows = at<const bf16>(16).data(),
                     .more = at<const bf16>(32).data(),
                     .num_rows = 8,
                     .num_more = 8,
                     .out = at<bf16>(0).data()};
  EXPECT_NO_THROW(cuda::check_alignment(sums));
  for (const auto& [name, rows] :
       {std::pair("rows", &RowSums::rows), std::pair("more", &RowSums::more)}) {
    RowSums bad = sums;
    bad.*rows = at<const bf16>(8).data();
    expect_refused(name, bad);
  }
  RowSums bad = sums;
  bad.out = at<bf16>(8).data();
  expect_refused("out", bad);
}

TEST(TensorAlignment, TensorsWithoutElementsMayBeAnywhere) {
  const auto none = at<const bf16>(2).first(0);
  EXPECT_NO_THROW(cuda::check_alignment(
      ForwardArgs{.x = none, .topk_probs = {}, .w1 = none, .w2 = none, .out = {}}));
}

void expect_supported(const std::optional<std::string>& reason) { EXPECT_EQ(reason, std::nullopt); }
void expect_unsupported(const char* name, const char* what,
                        const std::optional<std::string>& reason) {
  ASSERT_TRUE(reason);
  EXPECT_TRUE(reason->starts_with(cat(name, " "))) << *reason;
  EXPECT_NE(reason->find(what), std::string::npos) << *reason;
}

/// What the backend says of weights and of their gradients in that form.
template <class Expect>
void with_form(const testing::MatrixForm& form, std::int64_t intermediate, Expect&& expect) {
  const Problem problem{.intermediate = intermediate};
  const std::vector weights(2, at<const bf16>(0));
  const auto weight = testing::matrices_of<const bf16>(form, weights);
  const ExpertMatrices<const bf16> other(at<const bf16>(0));
  expect("w1", cuda::unsupported_reason(
                   {.x = {}, .topk_probs = {}, .w1 = weight, .w2 = other, .out = {}}, problem));
  expect("w1", cuda::unsupported_reason(
                   BackwardDataArgs{.dy = {}, .w1 = weight, .w2 = other, .dx = {}, .dprobs = {}},
                   problem));
  const std::vector bf16_grads(2, at<bf16>(0));
  const std::vector fp32_grads(2, at<float>(0));
  const auto bf16_grad = testing::matrices_of<bf16>(form, bf16_grads);
  const ExpertMatrices<bf16> other_grad(at<bf16>(0));
  const WeightGrad grads[] = {bf16_grad, testing::matrices_of<float>(form, fp32_grads),
                              Bf16MainGrad{bf16_grad}};
  for (const WeightGrad& grad : grads) {
    expect("dw1",
           cuda::unsupported_reason(BackwardWeightsArgs{.dw1 = grad, .dw2 = other_grad}, problem));
  }
}

TEST(MatrixOrder, WhatNoTensorMapDescribesIsUnsupported) {
  using enum ExpertForm;
  const auto is_supported = [](const char*, const auto& reason) { expect_supported(reason); };
  for (const ExpertForm form : {kOneTensor, kInterleaved, kGateAndUp, kOneEach}) {
    with_form(form, 8, is_supported);
    if (form != kInterleaved) with_form({form, true}, 64, is_supported);
  }
  with_form({kOneTensor, true}, 8, is_supported);
  with_form({kOneEach, true}, 8, is_supported);
  with_form({kInterleaved, true}, 64, [](const char* name, const auto& reason) {
    expect_unsupported(name, "by turns", reason);
  });
  for (const std::int64_t intermediate : {8, 63 * 8, 72}) {
    with_form({kGateAndUp, true}, intermediate, [&](const char* name, const auto& reason) {
      expect_unsupported(name, cat("intermediate=", intermediate).c_str(), reason);
    });
  }
}

}  // namespace
}  // namespace uniep::testing
