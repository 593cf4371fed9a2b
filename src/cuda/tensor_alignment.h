#pragma once

#include "base/row_sums.h"
#include "uniep/layer.h"

namespace uniep::cuda {

// Kernels read and write rows of H and I numbers 16 bytes at a time, the copy engine among them:
// each throws Error(kInvalidArgument) that names the argument and its address where such a tensor
// starts elsewhere. Tensors of [T, K] may start anywhere.

void check_alignment(const ForwardArgs& args);
void check_alignment(const BackwardDataArgs& args);
void check_alignment(const BackwardWeightsArgs& args);
void check_alignment(const RowSums& sums);

}  // namespace uniep::cuda
