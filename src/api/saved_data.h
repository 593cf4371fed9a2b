#pragma once

#include <memory>

#include "layout/workspace.h"
#include "uniep/layer.h"

namespace uniep {

/// What Saved holds. The buffers are written by forward and only read by backward.
struct SavedData {
  /// `rows` is the number of rows that the buffers have room for; `memory` owns `base`, at least
  /// SavedLayout(problem, rows).bytes.
  SavedData(const RoutingPlan& p, std::int64_t rows, std::shared_ptr<void> memory, std::byte* base)
      : plan(p), layout(p.problem(), rows), memory_(std::move(memory)), base_(base) {}

  bf16* x_rows() const { return at<bf16>(layout.x_rows); }
  bf16* h() const { return at<bf16>(layout.h); }
  float* row_probs() const { return at<float>(layout.row_probs); }

  RoutingPlan plan;
  SavedLayout layout;

 private:
  template <class T>
  T* at(std::int64_t offset) const {
    return reinterpret_cast<T*>(base_ + offset);
  }

  std::shared_ptr<void> memory_;
  std::byte* base_;
};

}  // namespace uniep
