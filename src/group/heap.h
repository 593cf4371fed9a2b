#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace uniep {

/// A block of memory, zero at first; pages that are never touched take no memory.
class Heap {
 public:
  /// Memory of this process alone. If there is not so much, throws what would need less.
  explicit Heap(std::int64_t bytes, const char* remedy = "a smaller max_tokens or capacity_rows");
  /// Memory that `owner` keeps.
  Heap(std::byte* data, std::int64_t bytes, std::shared_ptr<void> owner)
      : owner_(std::move(owner)), data_(data), bytes_(bytes) {}

  std::byte* data() const { return data_; }
  std::int64_t bytes() const { return bytes_; }
  const std::shared_ptr<void>& owner() const { return owner_; }

 private:
  std::shared_ptr<void> owner_;
  std::byte* data_ = nullptr;
  std::int64_t bytes_ = 0;
};

}  // namespace uniep
