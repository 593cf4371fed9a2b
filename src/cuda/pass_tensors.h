#pragma once

#include <cstdint>
#include <vector>

#include "cuda/expert_maps.h"
#include "cuda/stage_maps.h"
#include "layout/tensor_table.h"
#include "schedule/pass_view.h"
#include "uniep/layer.h"

namespace uniep::cuda {

/// The tensors of one pass in this rank's device memory. A weight gradient that is overwritten is
/// in the table too; one that is added to is not.
struct PassTensors {
  TensorTable table;
  ExpertMatrices<const bf16> w1{};
  ExpertMatrices<const bf16> w2{};
  WeightGrad dw1{};
  WeightGrad dw2{};
  WeightGrad db1{};  // of no elements without biases, as the next
  WeightGrad db2{};
  ExpertMatrices<const bf16> shared_w1{};  // of no elements without shared experts, as the next
  ExpertMatrices<const bf16> shared_w2{};
  WeightGrad dshared_w1{};
  WeightGrad dshared_w2{};

  /// Args: ForwardArgs or BackwardDataArgs.
  template <class Args>
  void set_weights(const Args& args) {
    w1 = args.w1;
    w2 = args.w2;
    shared_w1 = args.shared_w1;
    shared_w2 = args.shared_w2;
    table.set(Tensor::kW1, w1.data());
    table.set(Tensor::kW2, w2.data());
  }
  void set_weight_grads(const BackwardWeightsArgs& args);
  /// The tensor's gradient; null if it is no weight gradient.
  const WeightGrad* weight_grad(Tensor tensor) const;
  /// The tensor's matrices, if it is a weight or its gradient: those of this rank's experts, then
  /// those of the shared ones; none if one map has all of them. `by_halves`: gate and up are a
  /// matrix each, though they may follow one another.
  std::vector<MatricesApart> apart(Tensor tensor, const PassView& view, bool by_halves) const;
  /// DeviceContext::in_out.
  std::uint32_t in_out_stages() const;

 private:
  /// f(matrices) of a weight or its gradient.
  template <class F>
  auto with_matrices_of(Tensor tensor, F&& f) const {
    if (const WeightGrad* grad = weight_grad(tensor)) return with_matrices(*grad, f);
    return f(tensor == Tensor::kW1 ? w1 : w2);
  }
};

struct MappedPass {
  PassMaps maps;
  std::vector<ExpertMaps> experts;
};

/// Maps of the products that this part of the pass has: what they read and write follows from the
/// graph. `rows` is the number of rows that the row buffers hold, `saved_rows` of those that are
/// saved; `room` has that of PassScratchLayout::expert_maps.
MappedPass map_pass(const PassView& view, const PassTensors& tensors, std::int64_t rows,
                    std::int64_t saved_rows, CUtensorMap* room);

}  // namespace uniep::cuda
