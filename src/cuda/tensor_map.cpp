#include "cuda/tensor_map.h"

#include <algorithm>

#include "base/check.h"
#include "base/cuda/driver.h"

namespace uniep::cuda {

CUtensorMap tensor_map(const bf16* data, std::span<const std::int64_t> dimensions,
                       std::span<const int> box) {
  cuuint64_t sizes[4] = {};
  cuuint64_t strides[4] = {};
  cuuint32_t boxes[4] = {};
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  const auto rank = static_cast<cuuint32_t>(dimensions.size());
  std::ranges::copy(dimensions, sizes);
  std::ranges::copy(box, boxes);
  cuuint64_t bytes = sizeof(bf16);
  for (cuuint32_t i = 0; i < rank; ++i) {
    // A tensor without elements is never addressed; the driver wants sizes of at least 1.
    sizes[i] = std::max<cuuint64_t>(sizes[i], 1);
    bytes *= sizes[i];
    strides[i] = bytes;
  }
  CUtensorMap map;
  const CUresult result = tensor_map_encode_tiled()(
      &map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, rank, const_cast<bf16*>(data), sizes, strides, boxes,
      steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  require(result == CUDA_SUCCESS, ErrorCode::kDevice,
          "cuTensorMapEncodeTiled refused a tensor (error ", static_cast<int>(result),
          "); 16-byte aligned tensors of less than 2^32 elements a dimension are accepted");
  return map;
}

}  // namespace uniep::cuda
