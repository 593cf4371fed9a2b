#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "layer/expert_places.h"
#include "support/random_case.h"

namespace uniep::testing {

/// How the weights of experts, and their gradients, lie.
struct ExpertForms {
  ExpertForm w1 = ExpertForm::kOneTensor;
  ExpertForm w2 = ExpertForm::kOneTensor;
  ExpertForm dw1 = ExpertForm::kOneTensor;
  ExpertForm dw2 = ExpertForm::kOneTensor;
};

inline ExpertForm random_form(Rng& rng, bool has_up) {
  constexpr ExpertForm kForms[] = {ExpertForm::kOneTensor, ExpertForm::kOneEach,
                                   ExpertForm::kInterleaved, ExpertForm::kGateAndUp};
  return kForms[pick(rng, 0, has_up ? 3 : 1)];
}
inline ExpertForms random_forms(Rng& rng, bool gated) {
  return {random_form(rng, gated), random_form(rng, false), random_form(rng, gated),
          random_form(rng, false)};
}
inline std::string to_string(const ExpertForms& f) {
  return cat(static_cast<int>(f.w1), static_cast<int>(f.w2), static_cast<int>(f.dw1),
             static_cast<int>(f.dw2));
}

/// The tensors of a form, as vectors.
template <class T>
using FormTensors = std::vector<std::vector<T>>;

/// f(tensor, offset in it, offset in one tensor) for each row of the matrices.
template <class F>
void for_each_row(ExpertForm form, const ExpertShape& s, F&& f) {
  std::int64_t row = 0;
  for (std::int64_t e = 0; e < s.experts; ++e) {
    for (std::int64_t p = 0; p < s.parts; ++p) {
      for (std::int64_t r = 0; r < s.rows; ++r, ++row) {
        std::int64_t tensor = 0, at = row;
        if (form == ExpertForm::kInterleaved) at = (e * s.rows + r) * s.parts + p;
        if (form == ExpertForm::kGateAndUp) tensor = p, at = e * s.rows + r;
        if (form == ExpertForm::kOneEach) tensor = e, at = p * s.rows + r;
        f(static_cast<std::size_t>(tensor), at * s.cols, row * s.cols);
      }
    }
  }
}

template <class T>
FormTensors<std::remove_const_t<T>> scattered(ExpertForm form, const ExpertShape& shape,
                                              std::span<T> values) {
  const std::int64_t count = form == ExpertForm::kGateAndUp ? 2
                             : form == ExpertForm::kOneEach ? shape.experts
                                                            : 1;
  FormTensors<std::remove_const_t<T>> tensors(static_cast<std::size_t>(count));
  for (auto& tensor : tensors) tensor.resize(values.size() / tensors.size());
  for_each_row(form, shape, [&](std::size_t tensor, std::int64_t to, std::int64_t from) {
    std::copy_n(values.data() + from, shape.cols, tensors[tensor].data() + to);
  });
  return tensors;
}

template <class T>
void gather(ExpertForm form, const ExpertShape& shape, const FormTensors<T>& tensors,
            std::span<T> values) {
  for_each_row(form, shape, [&](std::size_t tensor, std::int64_t from, std::int64_t to) {
    std::copy_n(tensors[tensor].data() + from, shape.cols, values.data() + to);
  });
}

/// `tensors` outlives what this returns.
template <class T>
ExpertMatrices<T> matrices_of(ExpertForm form, std::span<const std::span<T>> tensors) {
  switch (form) {
    case ExpertForm::kOneTensor:
      break;
    case ExpertForm::kInterleaved:
      return ExpertMatrices<T>::interleaved(tensors[0]);
    case ExpertForm::kGateAndUp:
      return ExpertMatrices<T>::gate_and_up(tensors[0], tensors[1]);
    case ExpertForm::kOneEach:
      return ExpertMatrices<T>::one_each(tensors);
  }
  return tensors[0];
}

/// One rank's weights and gradients in the memory of their forms, for a step.
class FormedStep {
 public:
  FormedStep(const ExpertForms& forms, const Problem& problem, int ranks)
      : forms_(forms),
        first_(shape_of_w1(problem, problem.num_experts / ranks, halves(problem))),
        second_(shape_of_w2(problem, problem.num_experts / ranks)) {}

  ForwardArgs forward(ForwardArgs args) {
    args.w1 = copy(forms_.w1, first_, args.w1.tensor(), weights_);
    args.w2 = copy(forms_.w2, second_, args.w2.tensor(), weights_);
    return args;
  }
  BackwardArgs backward(BackwardArgs args) {
    args.w1 = copy(forms_.w1, first_, args.w1.tensor(), weights_);
    args.w2 = copy(forms_.w2, second_, args.w2.tensor(), weights_);
    args.dw1 = grad(forms_.dw1, first_, args.dw1);
    args.dw2 = grad(forms_.dw2, second_, args.dw2);
    return args;
  }
  /// Brings what the gradients have become to where `args` had them at first.
  void store(const BackwardArgs& args) const {
    store_grad(forms_.dw1, first_, 0, args.dw1);
    store_grad(forms_.dw2, second_, 1, args.dw2);
  }

 private:
  /// Tensors and the list of them, which stay where they are.
  template <class T>
  struct Copy {
    FormTensors<std::remove_const_t<T>> tensors;
    std::vector<std::span<T>> list;
  };

  template <class T>
  ExpertMatrices<T> copy(ExpertForm form, const ExpertShape& shape, std::span<T> values,
                         std::deque<Copy<T>>& copies) {
    Copy<T>& made = copies.emplace_back();
    made.tensors = scattered(form, shape, values);
    for (auto& tensor : made.tensors) made.list.emplace_back(tensor);
    return matrices_of<T>(form, made.list);
  }
  WeightGrad grad(ExpertForm form, const ExpertShape& shape, const WeightGrad& grad) {
    if (const auto* fp32 = std::get_if<ExpertMatrices<float>>(&grad)) {
      return copy(form, shape, fp32->tensor(), fp32_grads_);
    }
    if (const auto* main = std::get_if<Bf16MainGrad>(&grad)) {
      return Bf16MainGrad{copy(form, shape, main->values.tensor(), grads_)};
    }
    return copy(form, shape, std::get<ExpertMatrices<bf16>>(grad).tensor(), grads_);
  }
  void store_grad(ExpertForm form, const ExpertShape& shape, std::size_t index,
                  const WeightGrad& grad) const {
    if (const auto* fp32 = std::get_if<ExpertMatrices<float>>(&grad)) {
      return gather(form, shape, fp32_grads_[index].tensors, fp32->tensor());
    }
    const auto* main = std::get_if<Bf16MainGrad>(&grad);
    gather(form, shape, grads_[index].tensors,
           main != nullptr ? main->values.tensor() : std::get<ExpertMatrices<bf16>>(grad).tensor());
  }

  const ExpertForms forms_;
  const ExpertShape first_, second_;
  std::deque<Copy<const bf16>> weights_;
  std::deque<Copy<bf16>> grads_;
  std::deque<Copy<float>> fp32_grads_;
};

}  // namespace uniep::testing
