#pragma once

#include <algorithm>
#include <vector>

#include "reference/matrix.h"
#include "reference/plan.h"

namespace uniep::reference {

/// The rows of one expert, copied from a [tokens, width] tensor.
template <class T>
Matrix<T> dispatch(const std::vector<T>& tensor, std::int64_t width, const std::vector<Row>& rows) {
  Matrix<T> segment(static_cast<std::int64_t>(rows.size()), width);
  for (std::int64_t r = 0; r < segment.rows; ++r) {
    const T* source = tensor.data() + rows[static_cast<std::size_t>(r)].token * width;
    std::copy_n(source, width, segment.row(r));
  }
  return segment;
}

/// The probability of every row.
template <class T>
std::vector<T> dispatch_probs(const std::vector<T>& topk_probs, const std::vector<Row>& rows) {
  std::vector<T> probs;
  probs.reserve(rows.size());
  for (const Row& row : rows) probs.push_back(topk_probs[static_cast<std::size_t>(row.slot)]);
  return probs;
}

/// Expert e's [rows, cols] slice of a weight tensor [E, rows, cols].
template <class T>
Matrix<T> expert_weight(const std::vector<T>& tensor, std::int64_t e, std::int64_t rows,
                        std::int64_t cols) {
  Matrix<T> weight(rows, cols);
  std::copy_n(tensor.data() + e * rows * cols, rows * cols, weight.values.data());
  return weight;
}

}  // namespace uniep::reference
