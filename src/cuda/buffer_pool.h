#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>

#include "cuda/device_array.h"

namespace uniep::cuda {

/// Device memory that is handed out again when its last user lets go of it. All users work on one
/// stream, so what is still running with a buffer comes before what uses it next.
class BufferPool {
 public:
  BufferPool() : shelves_(std::make_shared<Shelves>()) {}

  /// `bytes` of memory, contents undefined. With `grow` false, which allocates nothing, throws
  /// Error(kUnsupported) where no such buffer is free.
  std::shared_ptr<std::byte> take(std::int64_t bytes, bool grow = true) {
    auto array = std::make_shared<DeviceArray<std::byte>>(shelves_->take(bytes, grow));
    return {array->data(), [array, bytes, shelves = shelves_](std::byte*) {
              shelves->put(bytes, std::move(*array));
            }};
  }

 private:
  struct Shelves {
    std::mutex mutex;
    std::multimap<std::int64_t, DeviceArray<std::byte>> free;

    DeviceArray<std::byte> take(std::int64_t bytes, bool grow) {
      const std::scoped_lock lock(mutex);
      const auto it = free.find(bytes);
      if (it == free.end()) {
        require(grow, ErrorCode::kUnsupported, "this CUDA graph capture needs another buffer of ",
                bytes, " bytes, and a capture cannot allocate; it finds what was made outside of ",
                "one: make the same calls there first, holding as many plans and saved at a time");
        return DeviceArray<std::byte>(bytes);
      }
      DeviceArray<std::byte> array = std::move(it->second);
      free.erase(it);
      return array;
    }
    void put(std::int64_t bytes, DeviceArray<std::byte> array) {
      const std::scoped_lock lock(mutex);
      free.emplace(bytes, std::move(array));
    }
  };

  std::shared_ptr<Shelves> shelves_;
};

}  // namespace uniep::cuda
