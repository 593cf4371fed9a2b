// The C API: weights and gradients that lie otherwise than in one tensor.
#include <gtest/gtest.h>

#include "api/c_steps.h"
#include "base/check.h"
#include "support/expert_forms.h"

namespace uniep::testing {
namespace {

/// The tensors of a form, as the C API takes them.
struct CTensors {
  FormTensors<bf16> tensors;
  std::vector<void*> each;

  CTensors(const MatrixForm& form, const ExpertShape& shape, const std::vector<bf16>& values)
      : tensors(scattered(form, shape, std::span(values))) {
    for (auto& tensor : tensors) each.push_back(tensor.data());
  }
};

struct FormedCall {
  FormedCall(const CLayer& layer, const LayerData& data, const ExpertForms& f)
      : forms(f),
        first(shape_of_w1(layer.problem(), data.num_experts, 2)),
        second(shape_of_w2(layer.problem(), data.num_experts)),
        w1(f.w1, first, data.w1),
        w2(f.w2, second, data.w2),
        dw1(f.dw1, first, data.w1),
        dw2(f.dw2, second, data.w2) {}

  /// Call: of either direction.
  template <class Call>
  void set_weights(Call& c) {
    c.w1 = c.w2 = nullptr;
    if (forms.w1.form == ExpertForm::kOneEach) {
      c.w1_each = w1.each.data();
    } else {
      c.w1 = w1.each[0];
      c.interleaved = forms.w1.form == ExpertForm::kInterleaved ? 1 : 0;
      if (forms.w1.form == ExpertForm::kGateAndUp) c.w3 = w1.each[1];
    }
    c.in_out = forms.w1.in_out ? 1 : 0;
    forms.w2.form == ExpertForm::kOneEach ? c.w2_each = w2.each.data() : c.w2 = w2.each[0];
  }
  void set_grads(uniep_backward_call& c) {
    c.dw1 = c.dw2 = nullptr;
    if (forms.dw1.form == ExpertForm::kOneEach) {
      c.dw1_each = dw1.each.data();
    } else {
      c.dw1 = dw1.each[0];
      c.dw_interleaved = forms.dw1.form == ExpertForm::kInterleaved ? 1 : 0;
      if (forms.dw1.form == ExpertForm::kGateAndUp) c.dw3 = dw1.each[1];
    }
    c.dw_in_out = forms.dw1.in_out ? 1 : 0;
    if (forms.dw2.form == ExpertForm::kOneEach) {
      c.dw2_each = dw2.each.data();
    } else {
      c.dw2 = dw2.each[0];
    }
  }
  void store(LayerResult& result) const {
    gather(forms.dw1, first, dw1.tensors, std::span(result.dw1));
    gather(forms.dw2, second, dw2.tensors, std::span(result.dw2));
  }

  ExpertForms forms;
  ExpertShape first, second;
  CTensors w1, w2, dw1, dw2;
};

/// Steps whose weights and gradients have random forms, of which each has the contract's bits.
void check_random_forms(const CLayer& layer, const LayerData& data, unsigned seeds) {
  for (unsigned seed = 1; seed <= seeds; ++seed) {
    Rng rng(seed);
    ExpertForms forms = random_forms(rng, true);
    forms.w2.in_out = forms.w1.in_out;  // the C API has one word for both
    forms.dw2.in_out = forms.dw1.in_out;
    CStep step(layer, data);
    FormedCall formed(layer, step.data(), forms);
    uniep_forward_call forward = step.forward_call();
    formed.set_weights(forward);
    expect_ok(uniep_forward(layer.get(), &forward));
    uniep_backward_call backward = step.backward_call();
    formed.set_weights(backward);
    formed.set_grads(backward);
    expect_ok(uniep_backward(layer.get(), &backward));
    formed.store(step.result());
    step.expect_contract(to_string(forms));
  }
}

TEST(CApi, WeightsMayLieAnywhere) {
  check_random_forms(CLayer(problem_of_batches()), batch(2), 20);
}

TEST(CApi, WeightsMayLieAnywhereBesideSharedExperts) {
  const LayerData data = batch_with_shared(true);
  Problem problem = problem_of_batches();
  problem.shared_experts = data.shared_experts;
  check_random_forms(CLayer(problem), data, 5);
}

TEST(CApi, WeightsAreGivenInOneWay) {
  const CLayer layer(problem_of_batches());
  CStep step(layer, batch(1));
  FormedCall each(layer, step.data(), {.w1 = ExpertForm::kOneEach, .w2 = ExpertForm::kOneEach});
  uniep_forward_call call = step.forward_call();
  call.w1_each = each.w1.each.data();
  expect_refused(uniep_forward(layer.get(), &call),
                 "rank 0: w1 is given beside a tensor for each expert; NULL is accepted");
  call.w1 = nullptr;
  call.interleaved = 1;
  expect_refused(
      uniep_forward(layer.get(), &call),
      "rank 0: w1 is given in 2 ways; one of interleaved, a tensor of up, and a tensor for each "
      "expert is accepted");
  call.interleaved = 0;
  each.w1.each[1] = nullptr;
  expect_refused(uniep_forward(layer.get(), &call),
                 "rank 0: w1_each[1] is NULL; an address is accepted");
}

}  // namespace
}  // namespace uniep::testing
