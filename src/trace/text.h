#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace uniep::trace {

enum class Anchor { kStart, kMiddle, kEnd };

struct TextStyle {
  double size = 12;
  std::string_view color = "#20252e";
  Anchor anchor = Anchor::kStart;
  bool bold = false;
};

/// How wide a text will be at most. The viewer's font is not known, so this takes the widest of
/// those that Svg::document names; all layout goes by it.
double text_width(std::string_view text, const TextStyle& style);

/// Lines no wider than `width`, broken behind a space, a comma or a slash where there is one. Of
/// more than `most` lines the rest is cut, and the last one ends with an ellipsis.
std::vector<std::string> wrapped(std::string_view text, const TextStyle& style, double width,
                                 std::size_t most = 4);

}  // namespace uniep::trace
