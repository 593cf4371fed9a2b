#include "base/quotes.h"

namespace uniep {
namespace {

constexpr std::string_view kEllipsis = "...";

/// Whether a letter of UTF-8 goes on here.
bool continues_letter(char c) { return (static_cast<unsigned char>(c) & 0xc0) == 0x80; }

/// The place at or before `at` where a text can be cut.
std::size_t cut_before(std::string_view text, std::size_t at) {
  while (at > 0 && continues_letter(text[at])) --at;
  return at;
}

/// The place at or behind `at` where a text can be cut.
std::size_t cut_behind(std::string_view text, std::size_t at) {
  while (at < text.size() && continues_letter(text[at])) ++at;
  return at;
}

/// How many bytes a letter of UTF-8 has that begins with this one; 0: none does.
std::size_t bytes_of_letter(unsigned char first) {
  if (first < 0x80) return 1;
  if (first < 0xc2) return 0;  // goes on, or would begin what has a shorter form
  if (first < 0xe0) return 2;
  if (first < 0xf0) return 3;
  return first < 0xf5 ? 4 : 0;
}

/// Whether the second byte makes a letter that has no shorter form, and is one at all.
bool may_follow(unsigned char first, unsigned char second) {
  switch (first) {
    case 0xe0:
      return second >= 0xa0;
    case 0xed:
      return second < 0xa0;
    case 0xf0:
      return second >= 0x90;
    case 0xf4:
      return second < 0x90;
    default:
      return true;
  }
}

/// Bytes of the letter that a text begins with; 0: it does not begin with one.
std::size_t first_letter(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const std::size_t bytes = bytes_of_letter(byte(0));
  if (bytes > text.size() || (bytes > 1 && !may_follow(byte(0), byte(1)))) return 0;
  for (std::size_t i = 1; i < bytes; ++i) {
    if (!continues_letter(text[i])) return 0;
  }
  return bytes;
}

void replace_what_is_no_letter(std::string& text) {
  for (std::size_t i = 0; i < text.size();) {
    const std::size_t bytes = first_letter(std::string_view(text).substr(i));
    const bool control = static_cast<unsigned char>(text[i]) < 0x20 || text[i] == 0x7f;
    if (bytes == 0 || control) text[i] = '?';
    i += bytes == 0 ? 1 : bytes;
  }
}

}  // namespace

std::string shortened(std::string_view text, std::size_t most) {
  std::string shown(text);
  if (text.size() > most) {
    const std::size_t kept = most - kEllipsis.size();
    const std::size_t head = cut_before(text, kept - kept / 2);
    const std::size_t tail = cut_behind(text, text.size() - kept / 2);
    shown = std::string(text.substr(0, head)).append(kEllipsis).append(text.substr(tail));
  }
  replace_what_is_no_letter(shown);
  return shown;
}

std::string in_quotes(std::string_view text) { return '\'' + shortened(text) + '\''; }

}  // namespace uniep
