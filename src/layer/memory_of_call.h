#pragma once

#include <array>
#include <cstddef>
#include <span>

#include "uniep/layer.h"

namespace uniep {

/// Whether these share no byte.
bool are_apart(std::span<const std::byte> a, std::span<const std::byte> b);

/// Where the tensors and the memory of a call lie. Of tensors for each expert, which may be many,
/// it knows nothing.
class MemoryOfCall {
 public:
  /// Rows and probabilities of tokens, whose memory a result may take.
  template <class T>
  void enters(const char* name, std::span<const T> tensor) {
    note(name, std::as_bytes(tensor), Use::kEnters);
  }
  template <class T>
  void reads(const char* name, std::span<T> tensor) {
    note(name, std::as_bytes(tensor), Use::kRead);
  }
  template <class T>
  void reads(const char* name, const ExpertMatrices<const T>& matrices) {
    note(name, std::as_bytes(matrices.tensor()), Use::kRead);
    note(name, std::as_bytes(matrices.up()), Use::kRead);
  }
  template <class T>
  void writes(const char* name, std::span<T> tensor) {
    note(name, std::as_bytes(tensor), Use::kResult);
  }
  void writes(const char* name, const WeightGrad& grad);
  /// Memory that the call writes before all that enters it has been read.
  template <class T>
  void works_in(const char* name, std::span<T> memory) {
    note(name, std::as_bytes(memory), Use::kMemory);
  }

  /// Throws Error(kInvalidArgument) where what it writes shares memory with anything else here.
  void require_apart() const;

 private:
  enum class Use { kEnters, kRead, kResult, kMemory };
  struct Tensor {
    const char* name = nullptr;
    std::span<const std::byte> bytes{};
    Use use = Use::kRead;

    bool is_written() const { return use == Use::kResult || use == Use::kMemory; }
  };

  static bool must_be_apart(const Tensor& a, const Tensor& b);
  void note(const char* name, std::span<const std::byte> bytes, Use use) {
    if (!bytes.empty()) tensors_.at(count_++) = {name, bytes, use};
  }

  std::array<Tensor, 32> tensors_{};  // of a backward pass at most 26
  std::size_t count_ = 0;
};

}  // namespace uniep
