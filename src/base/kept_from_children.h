#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace uniep {

/// Descriptors of connections whose other ends are to notice when this process ends. Processes that
/// are forked off would keep them open; there /dev/null stands in their places, so that nobody
/// closes a number that has come to mean something else.
class KeptFromChildren {
 public:
  KeptFromChildren() = default;
  /// Keeps those of `descriptors` that are open.
  explicit KeptFromChildren(const std::vector<int>& descriptors);
  ~KeptFromChildren() { release(); }
  KeptFromChildren(KeptFromChildren&& other) noexcept : ids_(std::exchange(other.ids_, {})) {}
  KeptFromChildren& operator=(KeptFromChildren&& other) noexcept {
    if (this != &other) {
      release();
      ids_ = std::exchange(other.ids_, {});
    }
    return *this;
  }

 private:
  void release() noexcept;

  std::vector<std::uint64_t> ids_;  // of each
};

}  // namespace uniep
