#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>

#include "uniep/c_api.h"

namespace uniep::ops {

/// What one layer accepts: the figures that its tensors are checked against. As Python binds it.
struct LayerShape {
  std::int64_t hidden = 0;
  std::int64_t intermediate = 0;
  std::int64_t local_experts = 0;
  std::int64_t topk = 0;
  std::int64_t rows = 0;
  std::int64_t plan_bytes = 0;
  std::int64_t forward_bytes = 0;   ///< that a forward pass works in, with `rows` rows
  std::int64_t backward_bytes = 0;  ///< likewise, a backward pass
  std::int64_t rows_of_x = 0;       ///< that forward keeps: `rows`, or tokens that came, or none
  std::int64_t rows_of_h = 0;       ///< `rows`, or none
  std::int64_t keeps_tokens = 0;    ///< 1: rows_of_x are tokens
  std::int64_t h_width = 0;         ///< of a row of h; as many rows has an expert's w1
  std::int64_t has_bias = 0;        ///< 1: experts have biases
  std::int64_t shared_experts = 0;  ///< S
  std::int64_t slot_rows = 0;       ///< 1: out and dx are [T, K, H], a row for each slot
};

/// A layer that ops may call. `mutex` is held during each call: a layer serves one thread at a
/// time, and is not closed in the middle of a call.
struct BoundLayer {
  std::mutex mutex;
  uniep_layer* layer = nullptr;  ///< null once it is closed
  LayerShape shape;
};

/// Makes `layer` known under the number `id`, which the tensor at `key` holds.
void bind_layer(std::int64_t id, const void* key, uniep_layer* layer, const LayerShape& shape);

/// Forgets it, after the call that is going on. Unknown numbers are ignored.
void unbind_layer(std::int64_t id);

/// The layer whose key tensor is at this address, or null.
std::shared_ptr<BoundLayer> layer_at(const void* key);

/// The layer of this number, or null.
std::shared_ptr<BoundLayer> layer_of(std::int64_t id);

/// Holds a layer for calls that are no ops, between those of other threads.
class Turn {
 public:
  /// Waits for the calls that are going on. Null where the layer of this number is closed.
  static std::unique_ptr<Turn> begin(std::int64_t id);

 private:
  explicit Turn(std::shared_ptr<BoundLayer> bound) : bound_(std::move(bound)) {}

  const std::shared_ptr<BoundLayer> bound_;
  const std::unique_lock<std::mutex> lock_{bound_->mutex};
};

/// How many layers are bound.
std::int64_t bound_layers();

}  // namespace uniep::ops
