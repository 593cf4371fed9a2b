#include "cuda/add_rows.h"

#include "base/cuda/check_cuda.h"
#include "base/cuda/device_scope.h"
#include "cuda/tensor_alignment.h"

namespace uniep::cuda {
void add_rows(const RowSums& sums, int device, cudaStream_t stream) {
  check_alignment(sums);
  if (sums.tokens == 0) return;
  const DeviceScope scope(device);
  check_cuda(launch_add_rows(sums, stream), "launch add_rows");
}

}  // namespace uniep::cuda
