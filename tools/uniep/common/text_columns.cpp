#include "common/text_columns.h"

#include <algorithm>
#include <array>
#include <cstdint>

namespace uniep::tool {
namespace {

struct Range {
  std::uint32_t first, last;
};

// Blocks of Unicode rather than single characters: near enough for aligning and cutting.
constexpr std::array kCombining = {Range{0x300, 0x36f}, Range{0x200b, 0x200f},
                                   Range{0xfe00, 0xfe0f}, Range{0xfeff, 0xfeff}};
constexpr std::array kWide = {
    Range{0x1100, 0x115f}, Range{0x2e80, 0xa4cf}, Range{0xac00, 0xd7a3},   Range{0xf900, 0xfaff},
    Range{0xfe30, 0xfe6f}, Range{0xff00, 0xff60}, Range{0x1f300, 0x1faff}, Range{0x20000, 0x3fffd}};

template <std::size_t N>
bool is_in(const std::array<Range, N>& ranges, std::uint32_t code) {
  return std::ranges::any_of(ranges,
                             [&](const Range& r) { return code >= r.first && code <= r.last; });
}

struct Character {
  std::size_t bytes;
  std::size_t columns;
};

Character character_at(std::string_view text, std::size_t at) {
  const auto byte = [&](std::size_t i) {
    return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u;
  };
  const unsigned first = byte(at);
  const std::size_t length = first < 0xc0 ? 1 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
  if (length == 1) return {1, 1};
  std::uint32_t code = first & (0x7fu >> length);
  for (std::size_t i = 1; i < length; ++i) {
    if ((byte(at + i) & 0xc0u) != 0x80u) return {1, 1};
    code = code << 6 | (byte(at + i) & 0x3fu);
  }
  if (is_in(kCombining, code)) return {length, 0};
  return {length, is_in(kWide, code) ? std::size_t{2} : std::size_t{1}};
}

/// Bytes of the longest beginning of at most so many columns.
std::size_t bytes_within(std::string_view text, std::size_t columns) {
  std::size_t bytes = 0, used = 0;
  while (bytes < text.size()) {
    const Character c = character_at(text, bytes);
    if (used + c.columns > columns) break;
    used += c.columns;
    bytes += c.bytes;
  }
  return bytes;
}

}  // namespace

std::size_t columns_of(std::string_view text) {
  std::size_t columns = 0;
  for (std::size_t at = 0; at < text.size();) {
    const Character c = character_at(text, at);
    columns += c.columns;
    at += c.bytes;
  }
  return columns;
}

std::string cut_to_columns(std::string_view text, std::size_t columns) {
  if (columns_of(text) <= columns) return std::string(text);
  if (columns == 0) return "";
  return std::string(text.substr(0, bytes_within(text, columns - 1))) + "…";
}

}  // namespace uniep::tool
