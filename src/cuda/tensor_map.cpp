#include "cuda/tensor_map.h"

#include <algorithm>

#include "base/check.h"
#include "base/cuda/driver.h"

namespace uniep::cuda {

namespace {

CUtensorMapDataType type_of(Element element) {
  switch (element) {
    case Element::kBf16:
      return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    case Element::kFp32:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
    case Element::kUint32:
      return CU_TENSOR_MAP_DATA_TYPE_UINT32;
    case Element::kByte:
      return CU_TENSOR_MAP_DATA_TYPE_UINT8;
  }
  return CU_TENSOR_MAP_DATA_TYPE_UINT8;
}

}  // namespace

CUtensorMap tensor_map(const void* data, Element element, std::span<const std::int64_t> dimensions,
                       std::span<const int> box, std::optional<std::int64_t> row_stride) {
  cuuint64_t sizes[4] = {};
  cuuint64_t strides[4] = {};
  cuuint32_t boxes[4] = {};
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  const auto rank = static_cast<cuuint32_t>(dimensions.size());
  std::ranges::copy(dimensions, sizes);
  std::ranges::copy(box, boxes);
  auto bytes = static_cast<cuuint64_t>(bytes_of(element));
  for (cuuint32_t i = 0; i < rank; ++i) {
    // A tensor without elements is never addressed; the driver wants sizes of at least 1.
    sizes[i] = std::max<cuuint64_t>(sizes[i], 1);
    bytes *= i == 0 && row_stride ? static_cast<cuuint64_t>(*row_stride) : sizes[i];
    strides[i] = bytes;
  }
  CUtensorMap map;
  const CUresult result = tensor_map_encode_tiled()(
      &map, type_of(element), rank, const_cast<void*>(data), sizes, strides, boxes, steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  require(result == CUDA_SUCCESS, ErrorCode::kDevice,
          "cuTensorMapEncodeTiled refused a tensor (error ", static_cast<int>(result),
          "); 16-byte aligned tensors of less than 2^32 elements a dimension are accepted");
  return map;
}

}  // namespace uniep::cuda
