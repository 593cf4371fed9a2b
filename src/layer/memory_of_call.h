#pragma once

#include <array>
#include <cstddef>
#include <span>

#include "uniep/layer.h"

namespace uniep {

/// Whether these share no byte.
bool are_apart(std::span<const std::byte> a, std::span<const std::byte> b);

/// Where the tensors of a call lie: weights that it reads, and all that it writes. Of tensors for
/// each expert, which may be many, it knows nothing.
class MemoryOfCall {
 public:
  template <class T>
  void reads(const char* name, std::span<const T> tensor) {
    note(name, std::as_bytes(tensor), false);
  }
  template <class T>
  void reads(const char* name, const ExpertMatrices<const T>& matrices) {
    note(name, std::as_bytes(matrices.tensor()), false);
    note(name, std::as_bytes(matrices.up()), false);
  }
  template <class T>
  void writes(const char* name, std::span<T> tensor) {
    note(name, std::as_bytes(tensor), true);
  }
  void writes(const char* name, const WeightGrad& grad);

  /// Throws Error(kInvalidArgument) where what it writes shares memory with anything else here.
  void require_apart() const;

 private:
  struct Tensor {
    const char* name = nullptr;
    std::span<const std::byte> bytes{};
    bool is_written = false;
  };

  void note(const char* name, std::span<const std::byte> bytes, bool is_written) {
    if (!bytes.empty()) tensors_[count_++] = {name, bytes, is_written};
  }

  std::array<Tensor, 24> tensors_{};  // of a backward pass at most 19
  std::size_t count_ = 0;
};

}  // namespace uniep
