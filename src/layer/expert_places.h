#pragma once

#include <cstdint>
#include <variant>

#include "uniep/layer.h"

namespace uniep {

/// A weight of `experts` experts: `parts` matrices of each (gate and up), `rows` by `cols`. Rows of
/// an expert are counted through all of its parts.
struct ExpertShape {
  std::int64_t experts = 0;
  std::int64_t parts = 1;
  std::int64_t rows = 0;
  std::int64_t cols = 0;

  std::int64_t elements() const { return parts * rows * cols; }  // of an expert
};

/// P: Problem or PassView.
template <class P>
ExpertShape shape_of_w1(const P& p, std::int64_t experts, std::int64_t parts) {
  return {experts, parts, p.intermediate, p.hidden};
}
template <class P>
ExpertShape shape_of_w2(const P& p, std::int64_t experts) {
  return {experts, 1, p.hidden, p.intermediate};
}

/// Where each matrix of such a weight begins.
template <class T>
class ExpertPlaces {
 public:
  ExpertPlaces() = default;
  ExpertPlaces(const ExpertMatrices<T>& matrices, const ExpertShape& shape)
      : matrices_(matrices), shape_(shape) {}

  const ExpertShape& shape() const { return shape_; }
  /// Elements from a row of a matrix to its next.
  std::int64_t row_stride() const {
    return matrices_.form() == ExpertForm::kInterleaved ? shape_.parts * shape_.cols : shape_.cols;
  }

  /// Whether an expert's parts follow one another, as one matrix of all rows.
  bool is_joined() const {
    return matrices_.form() == ExpertForm::kOneTensor || matrices_.form() == ExpertForm::kOneEach;
  }

  T* matrix(std::int64_t expert, std::int64_t part) const {
    const std::int64_t size = shape_.rows * shape_.cols;
    switch (matrices_.form()) {
      case ExpertForm::kOneTensor:
        break;
      case ExpertForm::kInterleaved:
        return matrices_.data() + expert * shape_.elements() + part * shape_.cols;
      case ExpertForm::kGateAndUp:
        return (part == 0 ? matrices_.tensor() : matrices_.up()).data() + expert * size;
      case ExpertForm::kOneEach:
        return matrices_.each()[static_cast<std::size_t>(expert)].data() + part * size;
    }
    return matrices_.data() + (expert * shape_.parts + part) * size;
  }
  T* row(std::int64_t expert, std::int64_t row) const {
    return matrix(expert, row / shape_.rows) + row % shape_.rows * row_stride();
  }

 private:
  ExpertMatrices<T> matrices_{};
  ExpertShape shape_{};
};

inline bool is_overwritten(const WeightGrad& grad) {
  return std::holds_alternative<ExpertMatrices<bf16>>(grad);
}

/// f(matrices) of whatever type the gradient has.
template <class F>
decltype(auto) with_matrices(const WeightGrad& grad, F&& f) {
  if (const auto* main = std::get_if<Bf16MainGrad>(&grad)) return f(main->values);
  if (const auto* main = std::get_if<ExpertMatrices<float>>(&grad)) return f(*main);
  return f(std::get<ExpertMatrices<bf16>>(grad));
}

/// f(span) for each of the tensors that the matrices lie in.
template <class T, class F>
void for_each_tensor(const ExpertMatrices<T>& matrices, F&& f) {
  if (matrices.form() == ExpertForm::kOneEach) {
    for (const std::span<T>& tensor : matrices.each()) f(tensor);
    return;
  }
  f(matrices.tensor());
  if (matrices.form() == ExpertForm::kGateAndUp) f(matrices.up());
}

}  // namespace uniep
