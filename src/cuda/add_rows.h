#pragma once

#include <cuda_runtime.h>

#include "base/row_sums.h"

namespace uniep::cuda {

/// All of it in memory of the device, in the order of the stream; rows begin at multiples of 16
/// bytes.
void add_rows(const RowSums& sums, int device, cudaStream_t stream);

cudaError_t launch_add_rows(const RowSums& sums, cudaStream_t stream);

}  // namespace uniep::cuda
