#include "layer/memory_of_call.h"

#include <functional>

#include "base/check.h"
#include "layer/expert_places.h"

namespace uniep {

bool are_apart(std::span<const std::byte> a, std::span<const std::byte> b) {
  const auto ends_before = std::less_equal<const std::byte*>();
  return ends_before(a.data() + a.size(), b.data()) || ends_before(b.data() + b.size(), a.data());
}

void MemoryOfCall::writes(const char* name, const WeightGrad& grad) {
  with_matrices(grad, [&](const auto& matrices) {
    note(name, std::as_bytes(matrices.tensor()), Use::kResult);
    note(name, std::as_bytes(matrices.up()), Use::kResult);
  });
}

bool MemoryOfCall::must_be_apart(const Tensor& a, const Tensor& b) {
  if (a.use == Use::kEnters) return b.use == Use::kMemory;
  if (b.use == Use::kEnters) return a.use == Use::kMemory;
  return a.is_written() || b.is_written();
}

void MemoryOfCall::require_apart() const {
  const std::span<const Tensor> tensors(tensors_.data(), count_);
  for (std::size_t i = 0; i < count_; ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      const bool matters = must_be_apart(tensors[i], tensors[j]);
      if (!matters || are_apart(tensors[i].bytes, tensors[j].bytes)) continue;
      const bool first = tensors[i].is_written();
      throw Error(ErrorCode::kInvalidArgument,
                  cat(tensors[first ? i : j].name, " shares memory with ",
                      tensors[first ? j : i].name, "; memory of its own is accepted"));
    }
  }
}

}  // namespace uniep
