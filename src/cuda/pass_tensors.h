#pragma once

#include "cuda/stage_maps.h"
#include "layout/tensor_table.h"
#include "schedule/pass_view.h"
#include "uniep/layer.h"

namespace uniep::cuda {

/// The tensors of one pass in this rank's device memory. A weight gradient that is overwritten is
/// in the table too; one that is added to is not.
struct PassTensors {
  TensorTable table;
  WeightGrad dw1{};
  WeightGrad dw2{};
  WeightGrad db1{};  // of no elements without biases, as the next
  WeightGrad db2{};

  void set_weight_grads(const BackwardWeightsArgs& args);
  /// Of the tensor, if it is a weight gradient.
  const WeightGrad* weight_grad(Tensor tensor) const;
};

/// Maps of the products that this part of the pass has: what they read and write follows from the
/// graph. `rows` is the number of rows that the row buffers hold, `saved_rows` of those that are
/// saved.
PassMaps pass_maps(const PassView& view, const PassTensors& tensors, std::int64_t rows,
                   std::int64_t saved_rows);

}  // namespace uniep::cuda
