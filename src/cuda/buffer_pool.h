#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>

#include "cuda/device_array.h"

namespace uniep::cuda {

/// Device memory that is handed out again when its last user lets go of it. All users work on one
/// stream, so what is still running with a buffer comes before what uses it next.
///
/// That is not so for the replays of a CUDA graph, which write what its calls used whoever has it
/// by then. So a buffer that a captured call gave back serves calls alone from then on: they come
/// one after another, as replays do, and leave nothing in it that is read later.
class BufferPool {
 public:
  enum class Use {
    kCall,  ///< until the call at hand ends
    kHeld   ///< by what the caller gets, which lives as long as graphs that it was captured in
  };

  BufferPool() : shelves_(std::make_shared<Shelves>()) {}

  /// `bytes` of memory, contents undefined. With `captured`, which allocates nothing, throws
  /// Error(kUnsupported) where no such buffer is free.
  std::shared_ptr<std::byte> take(std::int64_t bytes, Use use, bool captured = false) {
    auto buffer = std::make_shared<Buffer>(shelves_->take(bytes, use, captured));
    std::byte* const memory = buffer->memory.data();
    return {memory, [buffer, bytes, shelves = shelves_](std::byte*) {
              shelves->put(bytes, std::move(*buffer));
            }};
  }

 private:
  struct Buffer {
    DeviceArray<std::byte> memory;
    bool of_graphs = false;  // replays may write it
  };

  struct Shelves {
    std::mutex mutex;
    std::multimap<std::int64_t, Buffer> free;

    Buffer take(std::int64_t bytes, Use use, bool captured) {
      const std::scoped_lock lock(mutex);
      Buffer buffer = find(bytes, use, captured);
      if (captured && use == Use::kCall) buffer.of_graphs = true;
      return buffer;
    }

    Buffer find(std::int64_t bytes, Use use, bool captured) {
      const auto [begin, end] = free.equal_range(bytes);
      auto found = end;
      for (auto it = begin; it != end; ++it) {
        if (it->second.of_graphs && use == Use::kHeld) continue;
        // Buffers that holders cannot have are taken first.
        if (found == end || it->second.of_graphs) found = it;
      }
      if (found == end) {
        require(!captured, ErrorCode::kUnsupported, "this CUDA graph capture needs another ",
                "buffer of ", bytes, " bytes, and a capture cannot allocate; it finds what was ",
                "made outside of one: make the same calls there first, holding as many plans and ",
                "saved at a time");
        return {DeviceArray<std::byte>::uninitialized(bytes)};
      }
      Buffer buffer = std::move(found->second);
      free.erase(found);
      return buffer;
    }

    void put(std::int64_t bytes, Buffer buffer) {
      const std::scoped_lock lock(mutex);
      free.emplace(bytes, std::move(buffer));
    }
  };

  std::shared_ptr<Shelves> shelves_;
};

}  // namespace uniep::cuda
