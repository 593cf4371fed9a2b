#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "layer/expert_places.h"
#include "support/random_case.h"

namespace uniep::testing {

/// How a weight of experts, or its gradient, lies.
struct MatrixForm {
  ExpertForm form = ExpertForm::kOneTensor;
  bool in_out = false;

  MatrixForm() = default;
  MatrixForm(ExpertForm f, bool transposed = false) : form(f), in_out(transposed) {}
};

struct ExpertForms {
  MatrixForm w1{};
  MatrixForm w2{};
  MatrixForm dw1{};
  MatrixForm dw2{};
};

inline MatrixForm random_form(Rng& rng, bool has_up) {
  constexpr ExpertForm kForms[] = {ExpertForm::kOneTensor, ExpertForm::kOneEach,
                                   ExpertForm::kInterleaved, ExpertForm::kGateAndUp};
  const ExpertForm form = kForms[pick(rng, 0, has_up ? 3 : 1)];
  return {form, chance(rng, 50)};
}
inline ExpertForms random_forms(Rng& rng, bool gated) {
  const auto form = [&](bool has_up) { return random_form(rng, has_up); };
  return {form(gated), form(false), form(gated), form(false)};
}
/// The same as far as tensor maps can describe it: [in, out] becomes [out, in] elsewhere.
inline MatrixForm mapped(MatrixForm f, std::int64_t intermediate) {
  const bool by_turns = f.form == ExpertForm::kInterleaved;
  const bool shares_boxes = f.form == ExpertForm::kGateAndUp && intermediate % 64 != 0;
  if (by_turns || shares_boxes) f.in_out = false;
  return f;
}
inline ExpertForms mapped(const ExpertForms& f, std::int64_t intermediate) {
  return {mapped(f.w1, intermediate), mapped(f.w2, intermediate), mapped(f.dw1, intermediate),
          mapped(f.dw2, intermediate)};
}
inline std::string to_string(const MatrixForm& f) {
  return cat(static_cast<int>(f.form), f.in_out ? "t" : "");
}
inline std::string to_string(const ExpertForms& f) {
  return cat(to_string(f.w1), to_string(f.w2), to_string(f.dw1), to_string(f.dw2));
}

/// The tensors of a form, as vectors.
template <class T>
using FormTensors = std::vector<std::vector<T>>;

/// f(tensor, offset in it, offset in one [out, in] tensor) for each element of the matrices.
template <class F>
void for_each_element(const MatrixForm& form, const ExpertShape& s, F&& f) {
  std::int64_t row = 0;
  for (std::int64_t e = 0; e < s.experts; ++e) {
    for (std::int64_t p = 0; p < s.parts; ++p) {
      for (std::int64_t r = 0; r < s.rows; ++r, ++row) {
        // The matrix in its tensor, which has so many outputs, and the row's among these.
        std::int64_t tensor = 0, matrix = e, outputs = s.parts * s.rows, output = p * s.rows + r;
        if (form.form == ExpertForm::kInterleaved) output = r * s.parts + p;
        if (form.form == ExpertForm::kGateAndUp) tensor = p, outputs = s.rows, output = r;
        if (form.form == ExpertForm::kOneEach) tensor = e, matrix = 0;
        for (std::int64_t c = 0; c < s.cols; ++c) {
          const std::int64_t at = form.in_out ? (matrix * s.cols + c) * outputs + output
                                              : (matrix * outputs + output) * s.cols + c;
          f(static_cast<std::size_t>(tensor), static_cast<std::size_t>(at),
            static_cast<std::size_t>(row * s.cols + c));
        }
      }
    }
  }
}

template <class T>
FormTensors<std::remove_const_t<T>> scattered(const MatrixForm& form, const ExpertShape& shape,
                                              std::span<T> values) {
  const std::int64_t count = form.form == ExpertForm::kGateAndUp ? 2
                             : form.form == ExpertForm::kOneEach ? shape.experts
                                                                 : 1;
  FormTensors<std::remove_const_t<T>> tensors(static_cast<std::size_t>(count));
  for (auto& tensor : tensors) tensor.resize(values.size() / tensors.size());
  for_each_element(form, shape, [&](std::size_t tensor, std::size_t to, std::size_t from) {
    tensors[tensor][to] = values[from];
  });
  return tensors;
}

template <class T>
void gather(const MatrixForm& form, const ExpertShape& shape, const FormTensors<T>& tensors,
            std::span<T> values) {
  for_each_element(form, shape, [&](std::size_t tensor, std::size_t from, std::size_t to) {
    values[to] = tensors[tensor][from];
  });
}

/// `tensors` outlives what this returns.
template <class T>
ExpertMatrices<T> matrices_of(const MatrixForm& form, std::span<const std::span<T>> tensors) {
  ExpertMatrices<T> matrices(tensors[0]);
  switch (form.form) {
    case ExpertForm::kOneTensor:
      break;
    case ExpertForm::kInterleaved:
      matrices = ExpertMatrices<T>::interleaved(tensors[0]);
      break;
    case ExpertForm::kGateAndUp:
      matrices = ExpertMatrices<T>::gate_and_up(tensors[0], tensors[1]);
      break;
    case ExpertForm::kOneEach:
      matrices = ExpertMatrices<T>::one_each(tensors);
      break;
  }
  return form.in_out ? matrices.in_out() : matrices;
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
  ExpertMatrices<T> copy(const MatrixForm& form, const ExpertShape& shape, std::span<T> values,
                         std::deque<Copy<T>>& copies) {
    Copy<T>& made = copies.emplace_back();
    made.tensors = scattered(form, shape, values);
    for (auto& tensor : made.tensors) made.list.emplace_back(tensor);
    return matrices_of<T>(form, made.list);
  }
  WeightGrad grad(const MatrixForm& form, const ExpertShape& shape, const WeightGrad& grad) {
    if (const auto* fp32 = std::get_if<ExpertMatrices<float>>(&grad)) {
      return copy(form, shape, fp32->tensor(), fp32_grads_);
    }
    if (const auto* main = std::get_if<Bf16MainGrad>(&grad)) {
      return Bf16MainGrad{copy(form, shape, main->values.tensor(), grads_)};
    }
    return copy(form, shape, std::get<ExpertMatrices<bf16>>(grad).tensor(), grads_);
  }
  void store_grad(const MatrixForm& form, const ExpertShape& shape, std::size_t index,
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
