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

  /// At least `bytes` of memory, contents undefined.
  std::shared_ptr<std::byte> take(std::int64_t bytes) {
    auto array = std::make_shared<DeviceArray<std::byte>>(shelves_->take(bytes));
    return {array->data(), [array, bytes, shelves = shelves_](std::byte*) {
              shelves->put(bytes, std::move(*array));
            }};
  }

 private:
  struct Shelves {
    std::mutex mutex;
    std::multimap<std::int64_t, DeviceArray<std::byte>> free;

    DeviceArray<std::byte> take(std::int64_t bytes) {
      const std::scoped_lock lock(mutex);
      const auto it = free.find(bytes);
      if (it == free.end()) return DeviceArray<std::byte>(bytes);
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
