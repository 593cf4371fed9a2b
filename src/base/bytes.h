#pragma once

#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>

namespace uniep {

/// A value as ranks send it to each other, who run the same code.
template <class T>
std::string to_bytes(const T& value) {
  static_assert(std::is_trivially_copyable_v<T>);
  return {reinterpret_cast<const char*>(&value), sizeof(T)};
}

/// The value at the front of what a rank sent; nothing where that is too short.
template <class T>
std::optional<T> from_bytes(std::string_view bytes) {
  static_assert(std::is_trivially_copyable_v<T>);
  if (bytes.size() < sizeof(T)) return std::nullopt;
  T value;
  std::memcpy(&value, bytes.data(), sizeof(T));
  return value;
}

}  // namespace uniep
