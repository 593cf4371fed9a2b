#include "trace/text.h"

#include <array>

#include "trace/utf8.h"

namespace uniep::trace {
namespace {

/// Advance widths of the printable ASCII characters in hundredths of the size: of each the wider of
/// DejaVu Sans 2.37 and Liberation Sans 2.1 (which has Arial's and Helvetica's), from their `hmtx`.
using Widths = std::array<unsigned char, 95>;
constexpr Widths kRegular = {
    32, 41, 46, 84, 64, 96, 78, 28, 40,  40, 50, 84, 32, 37, 32, 34, 64, 64, 64, 64, 64, 64, 64, 64,
    64, 64, 34, 34, 84, 84, 84, 56, 102, 69, 69, 73, 78, 67, 62, 78, 76, 30, 50, 67, 56, 87, 75, 79,
    67, 79, 73, 67, 62, 74, 69, 99, 69,  67, 69, 40, 34, 40, 84, 56, 50, 62, 64, 55, 64, 62, 36, 64,
    64, 28, 28, 58, 28, 98, 64, 62, 64,  64, 42, 53, 40, 64, 60, 82, 60, 60, 53, 64, 34, 64, 84};
constexpr Widths kBold = {35,  46, 53, 84, 70, 101, 88, 31,  46, 46, 53, 84, 38, 42,  38, 37,
                          70,  70, 70, 70, 70, 70,  70, 70,  70, 70, 40, 40, 84, 84,  84, 62,
                          100, 78, 77, 74, 84, 69,  69, 83,  84, 38, 56, 78, 64, 100, 84, 86,
                          74,  86, 78, 73, 69, 82,  78, 111, 78, 73, 73, 46, 37, 46,  84, 56,
                          50,  68, 72, 60, 72, 68,  44, 72,  72, 35, 35, 67, 35, 105, 72, 69,
                          72,  72, 50, 60, 48, 72,  66, 93,  65, 66, 59, 72, 37, 72,  84};

/// Sums of widths in pixels differ by less.
constexpr double kRounding = 1e-6;

constexpr std::string_view kEllipsis = "\u2026";

bool begins_character(char c) { return (static_cast<unsigned char>(c) & 0xc0u) != 0x80u; }

/// The character of a UTF-8 text that begins at `i`.
std::string_view character_at(std::string_view utf8, std::size_t i) {
  std::size_t end = i + 1;
  while (end < utf8.size() && !begins_character(utf8[end])) ++end;
  return utf8.substr(i, end - i);
}

/// The width in units of the size. Others than ASCII are rare here (names of files), and get what
/// nearly all of them fit in.
double character_width(std::string_view character, bool bold) {
  const auto first = static_cast<unsigned char>(character[0]);
  if (first < 0x20 || first == 0x7f) return bold ? 0.62 : 0.56;  // shown as '?'
  if (first < 0x80) return 0.01 * (bold ? kBold : kRegular)[first - 0x20u];
  if (character == "\u00b5") return 0.74;
  return character.size() < 4 ? 1.2 : 1.35;
}

double width_of(std::string_view utf8, const TextStyle& style) {
  double ems = 0;
  for (std::size_t i = 0; i < utf8.size();) {
    const std::string_view c = character_at(utf8, i);
    ems += character_width(c, style.bold);
    i += c.size();
  }
  return style.size * ems;
}

/// Bytes of the longest beginning that fits.
std::size_t fitting(std::string_view utf8, const TextStyle& style, double width) {
  double used = 0;
  for (std::size_t i = 0; i < utf8.size();) {
    const std::string_view c = character_at(utf8, i);
    used += style.size * character_width(c, style.bold);
    if (used > width + kRounding && i > 0) return i;
    i += c.size();
  }
  return utf8.size();
}

/// The end of a line that has room for `room` bytes: behind a place to break, unless that would
/// leave most of the line empty.
std::size_t line_end(std::string_view rest, std::size_t room) {
  if (room >= rest.size()) return rest.size();
  if (rest[room] == ' ') return room;
  const std::size_t at = rest.find_last_of(" ,/", room - 1);
  return at == std::string_view::npos || at < room / 3 ? room : at + 1;
}

std::string_view without_spaces(std::string_view text) {
  const std::size_t first = text.find_first_not_of(' ');
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(' ') + 1 - first);
}

std::string cut(std::string_view utf8, const TextStyle& style, double width) {
  const double room = width - width_of(kEllipsis, style);
  return std::string(utf8.substr(0, fitting(utf8, style, room))) + std::string(kEllipsis);
}

}  // namespace

double text_width(std::string_view text, const TextStyle& style) {
  return width_of(to_utf8(text), style);
}

std::vector<std::string> wrapped(std::string_view text, const TextStyle& style, double width,
                                 std::size_t most) {
  const std::string utf8 = to_utf8(text);
  std::string_view rest = without_spaces(utf8);
  std::vector<std::string> lines;
  while (!rest.empty()) {
    if (lines.size() + 1 == most && width_of(rest, style) > width + kRounding) {
      lines.push_back(cut(rest, style, width));
      return lines;
    }
    const std::size_t end = line_end(rest, fitting(rest, style, width));
    lines.emplace_back(without_spaces(rest.substr(0, end)));
    rest = without_spaces(rest.substr(end));
  }
  return lines;
}

}  // namespace uniep::trace
