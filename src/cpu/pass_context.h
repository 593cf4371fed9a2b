#pragma once

#include <memory>
#include <vector>

#include "cpu/kernels/kernels.h"
#include "group/heap.h"
#include "layer/expert_places.h"
#include "layout/tensor_table.h"
#include "rail/rail.h"
#include "schedule/saved_rows.h"
#include "schedule/tokens_in_place.h"
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

/// A weight of one expert of this rank.
class ExpertWeight {
 public:
  /// `index` counts the experts of `places`.
  ExpertWeight(const ExpertPlaces<const bf16>& places, std::int64_t index)
      : places_(places), index_(index) {}

  bool is_joined() const { return places_.is_joined(); }
  /// What is multiplied to get outputs [first, ...) of a part: [inputs, outputs].
  MatrixView to_outputs(std::int64_t part, std::int64_t first) const {
    return {places_.matrix(index_, part) + first * places_.row_stride(), places_.col_stride(),
            places_.row_stride()};
  }
  /// What is multiplied to get gradients of inputs [first, ...) from a part's: [outputs, inputs].
  MatrixView to_inputs(std::int64_t part, std::int64_t first) const {
    return {places_.matrix(index_, part) + first * places_.col_stride(), places_.row_stride(),
            places_.col_stride()};
  }

 private:
  const ExpertPlaces<const bf16>& places_;
  std::int64_t index_;
};

/// What the stage routines of one pass read and write: the tensors of the graph, by name.
struct PassContext {
  const PassView& view;
  const Kernels& kernels;
  const std::vector<std::shared_ptr<Heap>>& heaps;  // by rank
  const SymmetricLayout& layout;
  TensorTable tensors{};
  ExpertPlaces<const bf16> routed_w1{};  // kW1 and kW2, which may be several tensors
  ExpertPlaces<const bf16> routed_w2{};
  ExpertPlaces<const bf16> shared_w1{};  // kSharedW1 and kSharedW2
  ExpertPlaces<const bf16> shared_w2{};
  WeightGrad dw1{};  // kDw1 and so on, which may be of several types, too
  WeightGrad dw2{};
  WeightGrad db1{};
  WeightGrad db2{};
  WeightGrad dshared_w1{};
  WeightGrad dshared_w2{};
  std::uint64_t rail_memory = 0;  // the number of the layer's memory, as rails know it

  template <Tensor t>
  TypeOf<t>* get() const {
    return tensors.get<t>();
  }
  ExpertWeight w1(int expert) const {
    if (view.is_shared(expert)) return {shared_w1, expert - view.routed_experts()};
    return {routed_w1, expert};
  }
  ExpertWeight w2(int expert) const {
    if (view.is_shared(expert)) return {shared_w2, expert - view.routed_experts()};
    return {routed_w2, expert};
  }
  /// Where that tensor of rows has row number `row` of the plan.
  template <Tensor t>
  std::int64_t row(std::int64_t row) const {
    return row_in<t>(view, row);
  }
  /// That row of x_rows or dy_rows, or the token in its place.
  template <Tensor t>
  const bf16* operand_row(int expert, std::int64_t row) const {
    const std::int64_t token = row - view.segment_begin[expert];
    if (is_in_place<t>(view, expert)) return get<kTokensOf<t>>() + token * view.hidden;
    return get<t>() + this->row<t>(row) * view.hidden;
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
