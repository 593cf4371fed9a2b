#pragma once

#include <cstdint>
#include <variant>

#include "uniep/layer.h"

namespace uniep {

/// A weight of `experts` experts: `parts` matrices of each (gate and up), `rows` outputs by `cols`
/// inputs, however they lie. Rows of an expert are counted through all of its parts.
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

/// Whether an expert's parts follow one another, as one matrix of all rows.
template <class T>
bool is_joined(const ExpertMatrices<T>& matrices) {
  return matrices.form() == ExpertForm::kOneTensor || matrices.form() == ExpertForm::kOneEach;
}

/// Where each element of such a weight lies.
template <class T>
class ExpertPlaces {
 public:
  ExpertPlaces() = default;
  ExpertPlaces(const ExpertMatrices<T>& matrices, const ExpertShape& shape)
      : matrices_(matrices), shape_(shape) {}

  const ExpertShape& shape() const { return shape_; }
  /// Elements from a row of a matrix to its next.
  std::int64_t row_stride() const {
    return (is_interleaved() ? shape_.parts : 1) * (matrices_.is_in_out() ? 1 : shape_.cols);
  }
  /// Elements from a column of a matrix to its next.
  std::int64_t col_stride() const {
    if (!matrices_.is_in_out()) return 1;
    return shape_.rows * (matrices_.form() == ExpertForm::kGateAndUp ? 1 : shape_.parts);
  }

  bool is_joined() const { return uniep::is_joined(matrices_); }

  T* matrix(std::int64_t expert, std::int64_t part) const {
    switch (matrices_.form()) {
      case ExpertForm::kOneTensor:
      case ExpertForm::kInterleaved:
        break;
      case ExpertForm::kGateAndUp:
        return (part == 0 ? matrices_.tensor() : matrices_.up()).data() +
               expert * shape_.rows * shape_.cols;
      case ExpertForm::kOneEach:
        return matrices_.each()[static_cast<std::size_t>(expert)].data() + part * part_stride();
    }
    return matrices_.data() + expert * shape_.elements() + part * part_stride();
  }
  T* element(std::int64_t expert, std::int64_t row, std::int64_t col) const {
    return matrix(expert, row / shape_.rows) + row % shape_.rows * row_stride() +
           col * col_stride();
  }

 private:
  bool is_interleaved() const { return matrices_.form() == ExpertForm::kInterleaved; }
  /// Elements from a part to the next of the same tensor.
  std::int64_t part_stride() const {
    return is_interleaved() ? row_stride() / shape_.parts : shape_.rows * row_stride();
  }

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
