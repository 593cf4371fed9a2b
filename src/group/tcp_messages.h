#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/bytes.h"

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

/// What each rank passed to an all_gather, by rank.
using Parts = std::vector<std::string>;

/// The result of an all_gather: the sizes of all parts, then the parts.
std::string pack(const Parts& parts);
Parts unpack(const std::string& all, int count);

}  // namespace uniep::tcp
