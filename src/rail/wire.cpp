#include "rail/wire.h"

#include <atomic>
#include <cstring>

#include "base/check.h"

namespace uniep::rail {
namespace {

struct BlockHeader {
  std::uint64_t memory = 0;
  std::uint64_t segments = 0;
  std::uint64_t signals = 0;
};

struct Piece {
  std::int64_t to = 0;
  std::int64_t bytes = 0;
};

/// Writes values one after another into bytes that have room for them.
class Writer {
 public:
  explicit Writer(Bytes& to) : to_(to.data()) {}

  void put(std::span<const std::byte> bytes) {
    if (!bytes.empty()) std::memcpy(to_, bytes.data(), bytes.size());
    to_ += bytes.size();
  }
  template <class T>
  void put_value(const T& value) {
    put(std::as_bytes(std::span(&value, 1)));
  }

 private:
  std::byte* to_;
};

/// Reads values one after another.
class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : bytes_(bytes) {}

  std::span<const std::byte> take(std::size_t count) {
    require(count <= bytes_.size(), ErrorCode::kIo, "a block between hosts is cut short");
    const auto taken = bytes_.first(count);
    bytes_ = bytes_.subspan(count);
    return taken;
  }
  template <class T>
  T take() {
    T value;
    std::memcpy(&value, take(sizeof(T)).data(), sizeof(T));
    return value;
  }
  template <class T>
  std::vector<T> take_all(std::uint64_t count) {
    require(count <= bytes_.size() / sizeof(T), ErrorCode::kIo,
            "a block between hosts is cut short");
    std::vector<T> values(count);
    if (count > 0) {
      std::memcpy(values.data(), take(count * sizeof(T)).data(), count * sizeof(T));
    }
    return values;
  }

 private:
  std::span<const std::byte> bytes_;
};

void require_range(std::int64_t from, std::int64_t bytes, std::span<std::byte> memory) {
  const auto size = static_cast<std::int64_t>(memory.size());
  require(from >= 0 && bytes >= 0 && bytes <= size && from <= size - bytes, ErrorCode::kIo,
          "a block between hosts is for bytes ", from, " to ", from + bytes, " of a memory of ",
          size);
}

std::uint32_t* counter_of(const RailBlock::Signal& signal, const RailMemory& memory) {
  require(signal.local >= 0 && static_cast<std::size_t>(signal.local) < memory.ranks.size(),
          ErrorCode::kIo, "a block between hosts is for local rank ", signal.local);
  const auto ranks_memory = memory.ranks[static_cast<std::size_t>(signal.local)];
  require_range(signal.counter, sizeof(std::uint32_t), ranks_memory);
  return reinterpret_cast<std::uint32_t*>(ranks_memory.data() + signal.counter);
}

}  // namespace

Bytes pack_header(MessageKind kind, std::size_t body_bytes) {
  Bytes bytes(sizeof(MessageHeader));
  Writer(bytes).put_value(MessageHeader{.kind = kind, .body_bytes = body_bytes});
  return bytes;
}

Bytes pack_block(std::uint64_t memory, const RailBlock& block) {
  std::size_t payload = 0;
  for (const auto& segment : block.segments) payload += segment.bytes.size();
  Bytes bytes(sizeof(BlockHeader) + block.segments.size() * sizeof(Piece) +
              block.signals.size() * sizeof(RailBlock::Signal) + payload);
  Writer writer(bytes);
  writer.put_value(BlockHeader{memory, block.segments.size(), block.signals.size()});
  for (const auto& segment : block.segments) {
    writer.put_value(Piece{segment.to, static_cast<std::int64_t>(segment.bytes.size())});
  }
  for (const auto& signal : block.signals) writer.put_value(signal);
  for (const auto& segment : block.segments) writer.put(segment.bytes);
  return bytes;
}

Bytes pack_failure(const RailFailure& failure) {
  const std::span sentence(failure.sentence);
  Bytes bytes(sizeof(std::int32_t) + sentence.size());
  Writer writer(bytes);
  writer.put_value(static_cast<std::int32_t>(failure.rank));
  writer.put(std::as_bytes(sentence));
  return bytes;
}

RailFailure unpack_failure(std::span<const std::byte> body) {
  Reader reader(body);
  const int rank = reader.take<std::int32_t>();
  const auto text = body.subspan(sizeof(std::int32_t));
  return {rank, {reinterpret_cast<const char*>(text.data()), text.size()}};
}

std::optional<std::uint64_t> memory_of(std::span<const std::byte> body) {
  if (body.size() < sizeof(BlockHeader)) return std::nullopt;
  return Reader(body).take<BlockHeader>().memory;
}

void deliver_block(std::span<const std::byte> body, const RailMemory& memory, int local) {
  Reader reader(body);
  const auto header = reader.take<BlockHeader>();
  const auto pieces = reader.take_all<Piece>(header.segments);
  const auto signals = reader.take_all<RailBlock::Signal>(header.signals);
  const auto own = memory.ranks[static_cast<std::size_t>(local)];
  std::vector<std::span<const std::byte>> from;
  for (const Piece& piece : pieces) {
    require_range(piece.to, piece.bytes, own);
    from.push_back(reader.take(static_cast<std::size_t>(piece.bytes)));
  }
  std::vector<std::uint32_t*> counters;
  for (const auto& signal : signals) counters.push_back(counter_of(signal, memory));

  for (std::size_t i = 0; i < pieces.size(); ++i) {
    if (!from[i].empty()) std::memcpy(own.data() + pieces[i].to, from[i].data(), from[i].size());
  }
  for (std::size_t i = 0; i < signals.size(); ++i) {
    std::atomic_ref(*counters[i]).fetch_add(signals[i].amount, std::memory_order_release);
  }
}

}  // namespace uniep::rail
