#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace uniep::trace {

enum class Anchor { kStart, kMiddle, kEnd };

struct TextStyle {
  double size = 12;
  std::string_view color = "#3c4350";
  Anchor anchor = Anchor::kStart;
  bool bold = false;
};

/// Collects the elements of an SVG document. Coordinates are pixels from the upper left corner.
class Svg {
 public:
  void rect(double x, double y, double width, double height, std::string_view fill,
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
  void bars(const std::vector<Bar>& bars, double y, double height, std::string_view fill);

  /// The document, with a white ground of its own: a viewer's dark one would swallow the text.
  std::string document(double width, double height, std::string_view title) const;

 private:
  std::string body_;
};

/// How wide a text will be, roughly (no font is measured).
double text_width(std::string_view text, double size);

/// A round step (1, 2 or 5 times a power of ten) that divides [0, max] into at most `most` parts.
double tick_step(double max, int most);

/// At most four significant digits, no exponent for what a plot shows.
std::string short_number(double value);

/// The unit in which a time axis up to `seconds` reads best.
struct TimeUnit {
  std::string_view name;
  double per_second;
};
TimeUnit time_unit(double seconds);

/// "12.3 ms"
std::string short_time(double seconds);

}  // namespace uniep::trace
