#include "trace/utf8.h"

#include <cstddef>
#include <cstdint>

namespace uniep::trace {
namespace {

std::uint32_t byte_at(std::string_view text, std::size_t i) {
  return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u;
}

/// Bytes of a character that begins so; 0: none does.
std::size_t length_of(std::uint32_t first) {
  if (first < 0x80) return 1;
  if (first < 0xc0) return 0;
  if (first < 0xe0) return 2;
  if (first < 0xf0) return 3;
  return first < 0xf8 ? 4 : 0;
}

/// Neither in more bytes than it needs, nor half of a UTF-16 pair, nor beyond the last one; nor
/// what is no character.
bool is_character(std::uint32_t code, std::size_t length) {
  constexpr std::uint32_t kLeast[] = {0, 0, 0x80, 0x800, 0x10000};
  const bool surrogate = code >= 0xd800 && code < 0xe000;
  const bool none = code == 0xfffe || code == 0xffff;
  return code >= kLeast[length] && code <= 0x10ffff && !surrogate && !none;
}

/// Bytes of the character at `i`; 0: there is none.
std::size_t character_at(std::string_view text, std::size_t i) {
  const std::uint32_t first = byte_at(text, i);
  const std::size_t length = length_of(first);
  if (length <= 1) return length;
  std::uint32_t code = first & (0x7fu >> length);
  for (std::size_t k = 1; k < length; ++k) {
    const std::uint32_t next = byte_at(text, i + k);
    if ((next & 0xc0u) != 0x80u) return 0;
    code = code << 6 | (next & 0x3fu);
  }
  return is_character(code, length) ? length : 0;
}

}  // namespace

std::string to_utf8(std::string_view bytes) {
  std::string text;
  for (std::size_t i = 0; i < bytes.size();) {
    const std::size_t length = character_at(bytes, i);
    text += length == 0 ? "\xef\xbf\xbd" : bytes.substr(i, length);
    i += length == 0 ? 1 : length;
  }
  return text;
}

}  // namespace uniep::trace
