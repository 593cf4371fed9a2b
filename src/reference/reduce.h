#pragma once

#include <algorithm>
#include <map>
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

/// Brings one number for each of the expert's rows back to its slot.
template <class T>
void combine(const std::vector<T>& segment, const std::vector<Row>& rows, std::vector<T>& slots) {
  for (std::size_t r = 0; r < segment.size(); ++r) {
    slots[static_cast<std::size_t>(rows[r].slot)] = segment[r];
  }
}

/// acc += row
template <class T>
void add_to(T* acc, const T* row, std::int64_t cols) {
  for (std::int64_t c = 0; c < cols; ++c) acc[c] += row[c];
}

/// out[t] = bf16(sum over combine groups ascending of the group's sum), which is that of slots
/// [t, k] with an expert of the group, k ascending. All sums are from +0. Dropped slots, and groups
/// without a slot, are left out. One group is the sum over k.
template <class Arithmetic, class T>
std::vector<T> reduce(const Matrix<T>& slots, const Inputs<T>& in) {
  const int group_experts = in.num_experts / in.combine_groups;
  const bool rounds = in.combine_groups > 1 && in.combine_partials == CombinePartials::kBf16;
  Matrix<T> sum(in.tokens, slots.cols);
  for (std::int64_t t = 0; t < in.tokens; ++t) {
    std::map<int, std::vector<std::int64_t>> groups;  // their slots
    for (std::int64_t slot = t * in.topk; slot < (t + 1) * in.topk; ++slot) {
      const std::int32_t expert = in.topk_ids[static_cast<std::size_t>(slot)];
      if (expert >= 0) groups[expert / group_experts].push_back(slot);
    }
    for (const auto& [group, members] : groups) {
      Matrix<T> part(1, slots.cols);
      for (const std::int64_t slot : members) add_to(part.row(0), slots.row(slot), slots.cols);
      if (rounds) part = stored<Arithmetic>(std::move(part));
      add_to(sum.row(t), part.row(0), slots.cols);
    }
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
