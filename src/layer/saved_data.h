#pragma once

#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "layout/workspace.h"
#include "uniep/layer.h"

namespace uniep {

/// The tensors that forward saves.
struct SavedTensors {
  bf16* x_rows = nullptr;
  bf16* h = nullptr;
  float* row_probs = nullptr;
};

/// What Saved holds. The tensors are written by forward and only read by backward, but for
/// `backward_rows`.
struct SavedData {
  /// In memory of uniep's own: `num_rows` is the number of rows that it has room for, `memory` owns
  /// `base`, at least SavedLayout(problem, num_rows).bytes.
  SavedData(const RoutingPlan& p, std::int64_t num_rows, std::shared_ptr<void> memory,
            std::byte* base)
      : plan(p), rows(num_rows), memory_(std::move(memory)) {
    const SavedLayout layout(p.problem(), num_rows);
    tensors = {.x_rows = reinterpret_cast<bf16*>(base + layout.x_rows),
               .h = reinterpret_cast<bf16*>(base + layout.h),
               .row_probs = reinterpret_cast<float*>(base + layout.row_probs)};
    own_bytes_ = layout.bytes;
  }
  /// In the caller's.
  SavedData(const RoutingPlan& p, std::int64_t num_rows, const SavedTensors& of_caller)
      : plan(p), rows(num_rows), tensors(of_caller) {}

  bf16* h() const { return tensors.h; }

  std::int64_t bytes() const {
    std::set<const std::byte*> held;  // what a captured call took stands in both
    for (const auto& of_call : captured_rows) held.insert(of_call.get());
    if (backward_rows && backward_rows->use_count() > 0) held.insert(backward_rows->get());
    const std::int64_t each = RowLayout(plan.problem(), rows, Pass::kBackward).bytes;
    return own_bytes_ + static_cast<std::int64_t>(held.size()) * each;
  }

  void hold_callers_rows(std::span<std::byte> memory) {
    backward_rows = std::shared_ptr<std::byte>(std::shared_ptr<void>(), memory.data());
  }

  RoutingPlan plan;
  std::int64_t rows;
  SavedTensors tensors;
  /// RowLayout of `rows` (null where there are none), from backward_data until backward_weights;
  /// the caller's has no owner.
  std::optional<std::shared_ptr<std::byte>> backward_rows;
  /// Those of captured calls, which replays write and read again.
  std::vector<std::shared_ptr<std::byte>> captured_rows;

 private:
  std::shared_ptr<void> memory_;
  std::int64_t own_bytes_ = 0;
};

}  // namespace uniep
