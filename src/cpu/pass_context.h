#pragma once

#include <memory>
#include <vector>

#include "cpu/kernels/kernels.h"
#include "group/heap.h"
#include "layout/tensor_table.h"
#include "schedule/saved_rows.h"
#include "uniep/layer.h"

namespace uniep::cpu {

/// The symmetric memory of one rank.
class Peer {
 public:
  Peer(const Heap& heap, const SymmetricLayout& layout) : heap_(heap), layout_(layout) {}

  template <Tensor t>
  TypeOf<t>* get() const {
    return reinterpret_cast<TypeOf<t>*>(heap_.data() + layout_[t]);
  }

 private:
  const Heap& heap_;
  const SymmetricLayout& layout_;
};

/// What the stage routines of one pass read and write: the tensors of the graph, by name.
struct PassContext {
  const PassView& view;
  const Kernels& kernels;
  const std::vector<std::shared_ptr<Heap>>& heaps;  // by rank
  const SymmetricLayout& layout;
  TensorTable tensors{};
  WeightGrad dw1{};  // kDw1 and so on, which may be of several types
  WeightGrad dw2{};
  WeightGrad db1{};
  WeightGrad db2{};
  WeightGrad dshared_w1{};
  WeightGrad dshared_w2{};

  template <Tensor t>
  TypeOf<t>* get() const {
    return tensors.get<t>();
  }
  /// The matrix of an expert of this rank, of `size` elements: in `routed`, or in `shared`.
  template <Tensor routed, Tensor shared>
  const bf16* weights(int expert, std::int64_t size) const {
    return view.is_shared(expert) ? get<shared>() + (expert - view.routed_experts()) * size
                                  : get<routed>() + expert * size;
  }
  const bf16* w1(int expert) const {
    return weights<Tensor::kW1, Tensor::kSharedW1>(expert, view.h_width() * view.hidden);
  }
  const bf16* w2(int expert) const {
    return weights<Tensor::kW2, Tensor::kSharedW2>(expert, view.hidden * view.intermediate);
  }
  /// Where that tensor of rows has row number `row` of the plan.
  template <Tensor t>
  std::int64_t row(std::int64_t row) const {
    return row_in<t>(view, row);
  }
  Peer peer(int rank) const { return {*heaps[static_cast<std::size_t>(rank)], layout}; }
};

/// Buffers of one worker, kept from task to task.
struct Scratch {
  GemmScratch packing;
  GemmScratch accumulators;       // fp32 results of the tile at hand
  std::vector<bf16> gathered[2];  // columns of an operand's rows that do not lie together
};

}  // namespace uniep::cpu
