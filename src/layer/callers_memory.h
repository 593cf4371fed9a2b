#pragma once

#include <cstddef>
#include <memory>

namespace uniep {

/// Memory that the caller brought and keeps, where memory of uniep's own would have an owner.
inline std::shared_ptr<std::byte> callers_memory(std::byte* memory) {
  return {std::shared_ptr<void>(), memory};
}

inline bool is_callers(const std::shared_ptr<std::byte>& memory) { return memory.use_count() == 0; }

}  // namespace uniep
