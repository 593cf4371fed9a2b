#pragma once

#include "comm/cpu_group.h"
#include "layout/workspace.h"
#include "uniep/layer.h"

namespace uniep {

/// What Saved holds. The buffers are written by forward and only read by backward.
struct SavedData {
  explicit SavedData(const RoutingPlan& p)
      : plan(p), layout(p.problem(), p.padded_rows()), heap(layout.bytes) {}

  bf16* x_rows() const { return at<bf16>(layout.x_rows); }
  bf16* h() const { return at<bf16>(layout.h); }
  float* row_probs() const { return at<float>(layout.row_probs); }

  template <class T>
  T* at(std::int64_t offset) const {
    return reinterpret_cast<T*>(heap.data() + offset);
  }

  RoutingPlan plan;
  SavedLayout layout;
  Heap heap;
};

}  // namespace uniep
