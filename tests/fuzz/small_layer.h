#pragma once

#include <cstddef>
#include <vector>

#include "io/safetensors.h"

namespace uniep::fuzz {

/// A valid layer file of about 2 KB: T=3, H=8, I=8, E=4, K=2. `wide_ids`: I64 instead of I32.
inline std::vector<std::byte> small_layer(bool wide_ids) {
  const std::vector<bf16> tokens(3 * 8, to_bf16(0.5f));
  const std::vector<bf16> weights(4 * 16 * 8, to_bf16(-1.5f));
  const std::vector<float> probs = {0.75f, 0.25f, 1, 0, 0.5f, 0.5f};
  const std::vector<std::int32_t> ids = {0, 3, 2, -1, 1, 1};
  const std::vector<std::int64_t> long_ids(ids.begin(), ids.end());
  const std::vector<io::Tensor> tensors = {
      io::make_tensor<bf16>("x", {3, 8}, tokens),
      wide_ids ? io::make_tensor<std::int64_t>("topk_ids", {3, 2}, long_ids)
               : io::make_tensor<std::int32_t>("topk_ids", {3, 2}, ids),
      io::make_tensor<float>("topk_probs", {3, 2}, probs),
      io::make_tensor<bf16>("w1", {4, 16, 8}, weights),
      io::make_tensor<bf16>("w2", {4, 8, 8}, std::span(weights).first(4 * 8 * 8)),
      io::make_tensor<bf16>("dy", {3, 8}, tokens)};
  return io::serialize_safetensors(tensors);
}

}  // namespace uniep::fuzz
