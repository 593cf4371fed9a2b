#pragma once

#include <cstddef>

#include "layout/workspace.h"

namespace uniep {

/// Where the tensors of a pass lie on one rank, by name. Null: the pass has no use for it.
class TensorTable {
 public:
  /// A tensor of the layer, with its type.
  template <Tensor t>
  UNIEP_HD TypeOf<t>* get() const {
    return static_cast<TypeOf<t>*>(at_[static_cast<int>(t)]);
  }
  UNIEP_HD void* operator[](Tensor t) const { return at_[static_cast<int>(t)]; }

  /// Sets a tensor that the pass only reads: the table does not know const.
  void set(Tensor t, const void* address) { at_[static_cast<int>(t)] = const_cast<void*>(address); }

  /// Sets those that the layout holds, in memory that starts at `base`.
  void set(const TensorLayout& layout, std::byte* base) {
    for (int i = 0; i < kNumTensors; ++i) {
      const auto tensor = static_cast<Tensor>(i);
      if (layout.holds(tensor)) set(tensor, base + layout[tensor]);
    }
  }

 private:
  void* at_[kNumTensors] = {};
};

}  // namespace uniep
