#pragma once

#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

// What the frames of a TcpBootstrap carry.

namespace uniep::tcp {

inline constexpr std::uint32_t kProtocol = 2;

struct Greeting {
  std::uint32_t protocol;
  std::int32_t size;
  std::int32_t port;  // MASTER_PORT: two groups that met on neighbouring ports are told apart
  std::uint32_t unused;
  std::uint64_t group;
};

struct Hello {
  std::uint32_t protocol;
  std::int32_t size;
  std::int32_t rank;
};

/// Why the group has failed; the sentence follows.
struct Verdict {
  std::int32_t code;
  std::int32_t failed_rank;
  std::int32_t missing_rank;  // kTimeout
  std::int32_t present;       // kTimeout
};

template <class T>
std::string to_bytes(const T& value) {
  return {reinterpret_cast<const char*>(&value), sizeof(T)};
}

/// The value at the front of a payload; nothing where the payload is too short.
template <class T>
std::optional<T> from_bytes(const std::string& bytes) {
  if (bytes.size() < sizeof(T)) return std::nullopt;
  T value;
  std::memcpy(&value, bytes.data(), sizeof(T));
  return value;
}

/// What each rank passed to an all_gather, by rank.
using Parts = std::vector<std::string>;

/// The result of an all_gather: the sizes of all parts, then the parts.
std::string pack(const Parts& parts);
Parts unpack(const std::string& all, int count);

}  // namespace uniep::tcp
