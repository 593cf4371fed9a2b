#pragma once

#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "trace/text.h"

namespace uniep::trace {

/// What a shape is filled with: a colour as #rrggbb, with diagonal lines on it or without.
struct Fill {
  std::string_view color;
  bool hatched = false;
  constexpr Fill(const char* c) : color(c) {}
  constexpr Fill(std::string_view c, bool h = false) : color(c), hatched(h) {}
};

/// Collects the elements of an SVG document. Coordinates are pixels from the upper left corner.
class Svg {
 public:
  void rect(double x, double y, double width, double height, Fill fill,
            std::string_view tooltip = {});
  /// A rectangle's outline, inside its edges.
  void frame(double x, double y, double width, double height, std::string_view color);
  void circle(double x, double y, double radius, Fill fill, std::string_view outline = {},
              std::string_view tooltip = {});
  void line(double x1, double y1, double x2, double y2, std::string_view color, double width = 1,
            bool dashed = false);
  /// `y` is the baseline.
  void text(double x, double y, std::string_view text, const TextStyle& style = {});
  /// Turned by 90 degrees, reading upwards, centred on (x, y).
  void vertical_text(double x, double y, std::string_view text, const TextStyle& style = {});

  struct Bar {
    double x = 0;
    double width = 0;
  };
  /// Many bars of one colour and height as a single element.
  void bars(const std::vector<Bar>& bars, double y, double height, Fill fill);

  /// What lies between two step functions, as columns of one width from `x` on.
  void area(double x, double column, const std::vector<double>& top,
            const std::vector<double>& bottom, Fill fill);

  /// The document, with a white ground of its own: a viewer's dark one would swallow the text.
  /// `title` and `description` are for those who do not see it.
  std::string document(double width, double height, std::string_view title,
                       std::string_view description) const;

 private:
  std::string fill_attribute(Fill fill);
  std::string definitions() const;

  std::string body_;
  std::set<std::string> hatched_;  ///< colours that a pattern is needed for
};

}  // namespace uniep::trace
