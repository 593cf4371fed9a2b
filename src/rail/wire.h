#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "rail/rail.h"

// What the messages of a rail carry: a header of fixed size, which says how long the body is.

namespace uniep::rail {

enum class MessageKind : std::uint32_t {
  kBlock,    ///< a RailBlock
  kFailure,  ///< of a rank that the sender knows of
  kBye,      ///< the sender goes in good order; no body
  kHeard     ///< answers each of the last two: it has come, and all before it; no body
};

/// Whether a sender must know that such a message has come before it may go.
constexpr bool is_answered(MessageKind kind) {
  return kind == MessageKind::kFailure || kind == MessageKind::kBye;
}

struct MessageHeader {
  std::uint32_t magic = kMagic;
  MessageKind kind = MessageKind::kBye;
  std::uint64_t body_bytes = 0;

  static constexpr std::uint32_t kMagic = 0x4c524e55;  // "UNRL"
};

/// What a rank says of itself when it connects.
struct Introduction {
  std::uint32_t magic = MessageHeader::kMagic;
  std::int32_t rank = -1;
  std::uint64_t group = 0;
};

using Bytes = std::vector<std::byte>;

/// A message of this kind.
Bytes pack_header(MessageKind kind, std::size_t body_bytes);
Bytes pack_block(std::uint64_t memory, const RailBlock& block);
Bytes pack_failure(const RailFailure& failure);

/// Throws Error(kIo) where the body is too short.
RailFailure unpack_failure(std::span<const std::byte> body);

/// The number of the memory that a block is for; nothing where the body is too short.
std::optional<std::uint64_t> memory_of(std::span<const std::byte> body);

/// Stores a block's bytes, then raises its counters. Throws Error(kIo) where it does not fit into
/// the memory; then nothing has been written.
void deliver_block(std::span<const std::byte> body, const RailMemory& memory, int local);

}  // namespace uniep::rail
