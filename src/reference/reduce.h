#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "reference/arithmetic.h"
#include "reference/inputs.h"
#include "reference/matrix.h"
#include "reference/plan.h"

namespace uniep::reference {

/// Brings one expert's rows back to their slots of a [tokens * K, width] buffer.
template <class T>
void combine(const Matrix<T>& segment, const std::vector<Row>& rows, Matrix<T>& slots) {
  for (std::int64_t r = 0; r < segment.rows; ++r) {
    std::copy_n(segment.row(r), segment.cols, slots.row(rows[static_cast<std::size_t>(r)].slot));
  }
}

/// The same for one number per row.
template <class T>
void combine(const std::vector<T>& segment, const std::vector<Row>& rows, std::vector<T>& slots) {
  for (std::size_t r = 0; r < segment.size(); ++r) {
    slots[static_cast<std::size_t>(rows[r].slot)] = segment[r];
  }
}

/// out[t] = bf16(sum over k ascending of slots[t, k]), from +0 and without the dropped slots.
template <class Arithmetic, class T>
std::vector<T> reduce(const Matrix<T>& slots, const Inputs<T>& in) {
  Matrix<T> sum(in.tokens, slots.cols);
  for (std::int64_t slot = 0; slot < slots.rows; ++slot) {
    if (in.topk_ids[static_cast<std::size_t>(slot)] < 0) continue;
    T* acc = sum.row(slot / in.topk);
    for (std::int64_t c = 0; c < slots.cols; ++c) acc[c] += slots.row(slot)[c];
  }
  return stored<Arithmetic>(std::move(sum)).values;
}

/// out[t] = bf16(sum over k ascending of p[t, k] slots[t, k]), likewise; each product is rounded.
template <class Arithmetic, class T>
std::vector<T> reduce_weighted(const Matrix<T>& slots, const Inputs<T>& in) {
  Matrix<T> weighted(slots.rows, slots.cols);
  for (std::int64_t slot = 0; slot < slots.rows; ++slot) {
    const T p = in.topk_probs[static_cast<std::size_t>(slot)];
    for (std::int64_t c = 0; c < slots.cols; ++c) weighted.row(slot)[c] = p * slots.row(slot)[c];
  }
  return reduce<Arithmetic>(weighted, in);
}

}  // namespace uniep::reference
