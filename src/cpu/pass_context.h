#pragma once

#include <memory>
#include <vector>

#include "cpu/kernels/kernels.h"
#include "group/heap.h"
#include "layer/expert_places.h"
#include "layout/tensor_table.h"
#include "rail/rail.h"
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
  ExpertPlaces<const bf16> w1{};  // kW1 and kW2, which may be several tensors
  ExpertPlaces<const bf16> w2{};
  WeightGrad dw1{};  // kDw1 and so on, which may be of several types, too
  WeightGrad dw2{};
  WeightGrad db1{};
  WeightGrad db2{};
  std::uint64_t rail_memory = 0;  // the number of the layer's memory, as rails know it

  template <Tensor t>
  TypeOf<t>* get() const {
    return tensors.get<t>();
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
  RailBlock block;                // what goes to another host
};

}  // namespace uniep::cpu
