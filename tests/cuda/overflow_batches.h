// Batches beside which the same memory is enough, and is not.
#pragma once

#include "cuda/gpu_group.h"

namespace uniep::testing {

/// Rows of a rank that hold a fitting batch, and no overflowing one.
inline constexpr std::int64_t kCapacity = 1600;

/// Half of the slots dropped, so that every rank's rows fit the capacity ...
inline LayerData fitting_batch(int ranks, unsigned seed = 1) {
  LayerData data = small_layer(ranks, seed);
  for (std::size_t i = 0; i < data.topk_ids.size(); i += 2) data.topk_ids[i] = -1;
  return data;
}

/// ... and none dropped, all of them sent to the experts of rank 0.
inline LayerData overflowing_batch(int ranks) {
  LayerData data = small_layer(ranks);
  const auto local_experts = static_cast<std::size_t>(data.num_experts / ranks);
  for (std::size_t i = 0; i < data.topk_ids.size(); ++i) {
    data.topk_ids[i] = static_cast<std::int32_t>(i % local_experts);
  }
  return data;
}

}  // namespace uniep::testing
