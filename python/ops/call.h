#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "layer_registry.h"
#include "tensors.h"

namespace uniep::ops {

/// One call of a layer, from finding it to its error. The layer is locked for as long as this
/// lives.
class Call {
 public:
  /// Finds the layer of a workspace by its key tensor; refuses where there is none.
  explicit Call(const Tensor& key);

  uniep_layer* layer() const { return bound_->layer; }
  const LayerShape& shape() const { return bound_->shape; }

  /// What calls with `rows` rows need, up to as many as the workspace has room for.
  uniep_memory_needs needs(std::int64_t rows) const;

  /// Throws the sentence of a function of the C API that returned this.
  static void check(int result);
  /// What the last function that failed in this thread returned.
  static int last_failure();

 private:
  std::shared_ptr<BoundLayer> bound_;
  std::unique_lock<std::mutex> lock_;
};

/// Uninitialised, what a layer of this shape has for `tokens` tokens: out, or dx.
inline Tensor empty_results(const LayerShape& shape, const Tensor& beside, std::int64_t tokens) {
  if (shape.slot_rows == 0) return empty(beside, ScalarType::BFloat16, {tokens, shape.hidden});
  return empty(beside, ScalarType::BFloat16, {tokens, shape.topk, shape.hidden});
}

/// The text of an optional argument as the C API takes it; valid as long as the argument.
inline const char* text_of(const std::optional<std::string>& text) {
  return text ? text->c_str() : nullptr;
}

}  // namespace uniep::ops
