#include "trace/svg.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "base/check.h"
#include "trace/utf8.h"

namespace uniep::trace {
namespace {

/// A coordinate: a hundredth of a pixel is more than any screen shows.
std::string coord(double v) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2f", v);
  std::string s = text;
  s.erase(s.find_last_not_of('0') + 1);
  if (s.back() == '.') s.pop_back();
  return s == "-0" ? "0" : s;
}

/// Escapes for XML; control characters, which XML 1.0 cannot hold, become '?', and what is no UTF-8
/// becomes U+FFFD.
std::string escaped(std::string_view text) {
  std::string s;
  for (const char c : to_utf8(text)) {
    switch (c) {
      case '&':
        s += "&amp;";
        break;
      case '<':
        s += "&lt;";
        break;
      case '>':
        s += "&gt;";
        break;
      case '"':
        s += "&quot;";
        break;
      default:
        s += static_cast<unsigned char>(c) < 0x20 ? '?' : c;
    }
  }
  return s;
}

std::string attribute(std::string_view name, std::string_view value) {
  return cat(' ', name, "=\"", value, '"');
}

std::string style_attributes(const TextStyle& style) {
  constexpr const char* kAnchors[] = {"start", "middle", "end"};
  std::string s = attribute("font-size", coord(style.size)) + attribute("fill", style.color);
  if (style.anchor != Anchor::kStart) {
    s += attribute("text-anchor", kAnchors[static_cast<int>(style.anchor)]);
  }
  if (style.bold) s += attribute("font-weight", "600");
  return s;
}

}  // namespace

void Svg::rect(double x, double y, double width, double height, std::string_view fill,
               std::string_view tooltip) {
  if (width <= 0 || height <= 0) return;
  body_ += cat("<rect", attribute("x", coord(x)), attribute("y", coord(y)),
               attribute("width", coord(width)), attribute("height", coord(height)),
               attribute("fill", fill));
  body_ += tooltip.empty() ? "/>\n" : cat("><title>", escaped(tooltip), "</title></rect>\n");
}

void Svg::line(double x1, double y1, double x2, double y2, std::string_view color, double width,
               bool dashed) {
  body_ += cat("<line", attribute("x1", coord(x1)), attribute("y1", coord(y1)),
               attribute("x2", coord(x2)), attribute("y2", coord(y2)), attribute("stroke", color),
               attribute("stroke-width", coord(width)),
               dashed ? attribute("stroke-dasharray", "4 3") : "", "/>\n");
}

void Svg::text(double x, double y, std::string_view text, const TextStyle& style) {
  body_ += cat("<text", attribute("x", coord(x)), attribute("y", coord(y)), style_attributes(style),
               '>', escaped(text), "</text>\n");
}

void Svg::vertical_text(double x, double y, std::string_view text, const TextStyle& style) {
  TextStyle centred = style;
  centred.anchor = Anchor::kMiddle;
  const std::string place = cat("translate(", coord(x), ' ', coord(y), ") rotate(-90)");
  body_ += cat("<text", attribute("transform", place), style_attributes(centred), '>',
               escaped(text), "</text>\n");
}

void Svg::bars(const std::vector<Bar>& bars, double y, double height, std::string_view fill) {
  if (bars.empty()) return;
  body_ += cat("<path", attribute("fill", fill), " d=\"");
  for (const Bar& bar : bars) {
    body_ += cat('M', coord(bar.x), ' ', coord(y), 'h', coord(bar.width), 'v', coord(height), 'h',
                 coord(-bar.width), 'z');
  }
  body_ += "\"/>\n";
}

std::string Svg::document(double width, double height, std::string_view title) const {
  return cat(
      "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<svg xmlns=\"http://www.w3.org/2000/svg\"",
      attribute("width", coord(width)), attribute("height", coord(height)),
      attribute("viewBox", "0 0 " + coord(width) + " " + coord(height)),
      attribute("font-family",
                "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', 'DejaVu Sans', "
                "Arial, sans-serif"),
      ">\n<title>", escaped(title), "</title>\n",
      "<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n", body_, "</svg>\n");
}

double text_width(std::string_view text, double size) {
  double ems = 0;
  for (const char c : text) {
    const bool narrow = std::string_view("iljtfr.,:;'|()[] ").find(c) != std::string_view::npos;
    const bool wide = std::string_view("mwMW@%").find(c) != std::string_view::npos;
    ems += narrow ? 0.37 : wide ? 0.88 : 0.62;
  }
  return size * ems;
}

double tick_step(double max, int most) {
  if (!(max > 0)) return 1;
  const double rough = max / most;
  const double power = std::pow(10.0, std::floor(std::log10(rough)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (factor * power >= rough * (1 - 1e-9)) return factor * power;
  }
  return 10 * power;
}

std::string short_number(double value) {
  char text[32];
  if (std::abs(value) >= 999.5) {
    std::snprintf(text, sizeof text, "%.0f", value);
  } else {
    std::snprintf(text, sizeof text, "%.3g", value);
  }
  return text;
}

TimeUnit time_unit(double seconds) {
  if (seconds < 1e-3) return {"\u00b5s", 1e6};
  if (seconds < 10) return {"ms", 1e3};
  return {"s", 1};
}

std::string short_time(double seconds) {
  const TimeUnit unit = time_unit(seconds);
  return cat(short_number(seconds * unit.per_second), ' ', unit.name);
}

}  // namespace uniep::trace
