#pragma once

#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "layout/workspace.h"
#include "uniep/layer.h"

namespace uniep {

/// What Saved holds. The buffers are written by forward and only read by backward, but for
/// `backward_rows`.
struct SavedData {
  /// `num_rows` is the number of rows that the buffers have room for; `memory` owns `base`, at
  /// least SavedLayout(problem, num_rows).bytes.
  SavedData(const RoutingPlan& p, std::int64_t num_rows, std::shared_ptr<void> memory,
            std::byte* base)
      : plan(p),
        rows(num_rows),
        layout(p.problem(), num_rows),
        memory_(std::move(memory)),
        base_(base) {}

  bf16* x_rows() const { return at<bf16>(layout.x_rows); }
  bf16* h() const { return at<bf16>(layout.h); }
  float* row_probs() const { return at<float>(layout.row_probs); }

  std::int64_t bytes() const {
    std::set<const std::byte*> held;  // what a captured call took stands in both
    for (const auto& of_call : captured_rows) held.insert(of_call.get());
    if (backward_rows) held.insert(backward_rows->get());
    const std::int64_t each = RowLayout(plan.problem(), rows, Pass::kBackward).bytes;
    return layout.bytes + static_cast<std::int64_t>(held.size()) * each;
  }

  RoutingPlan plan;
  std::int64_t rows;
  SavedLayout layout;
  /// RowLayout of `rows` (null where there are none), from backward_data until backward_weights.
  std::optional<std::shared_ptr<std::byte>> backward_rows;
  /// Those of captured calls, which replays write and read again.
  std::vector<std::shared_ptr<std::byte>> captured_rows;

 private:
  template <class T>
  T* at(std::int64_t offset) const {
    return reinterpret_cast<T*>(base_ + offset);
  }

  std::shared_ptr<void> memory_;
  std::byte* base_;
};

}  // namespace uniep
