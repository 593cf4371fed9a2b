#include "trace/svg.h"

#include <cmath>
#include <cstdio>

#include "base/check.h"
#include "trace/utf8.h"

namespace uniep::trace {
namespace {

/// A coordinate: a hundredth of a pixel is more than any screen shows.
std::string coord(double v) {
  ensure(std::isfinite(v), "a picture has a coordinate ", v);
  char text[400];
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
        s += static_cast<unsigned char>(c) < 0x20 || c == 0x7f ? '?' : c;
    }
  }
  return s;
}

std::string attribute(std::string_view name, std::string_view value) {
  return cat(' ', name, "=\"", value, '"');
}

std::string box_attributes(double x, double y, double width, double height) {
  return attribute("x", coord(x)) + attribute("y", coord(y)) + attribute("width", coord(width)) +
         attribute("height", coord(height));
}

/// The end of an element: with a tooltip, as its child.
std::string element_end(std::string_view name, std::string_view tooltip) {
  if (tooltip.empty()) return "/>\n";
  return cat("><title>", escaped(tooltip), "</title></", name, ">\n");
}

std::string style_attributes(const TextStyle& style) {
  constexpr const char* kAnchors[] = {"start", "middle", "end"};
  std::string s = attribute("font-size", coord(style.size)) + attribute("fill", style.color);
  if (style.anchor != Anchor::kStart) {
    s += attribute("text-anchor", kAnchors[static_cast<int>(style.anchor)]);
  }
  if (style.bold) s += attribute("font-weight", "bold");
  return s;
}

std::string pattern_name(std::string_view color) { return cat("hatched-", color.substr(1)); }

}  // namespace

std::string Svg::fill_attribute(Fill fill) {
  if (!fill.hatched) return attribute("fill", fill.color);
  hatched_.emplace(fill.color);
  return attribute("fill", cat("url(#", pattern_name(fill.color), ")"));
}

void Svg::rect(double x, double y, double width, double height, Fill fill,
               std::string_view tooltip) {
  if (width <= 0 || height <= 0) return;
  body_ += cat("<rect", box_attributes(x, y, width, height), fill_attribute(fill),
               element_end("rect", tooltip));
}

void Svg::frame(double x, double y, double width, double height, std::string_view color) {
  body_ += cat("<rect", box_attributes(x + 0.5, y + 0.5, width - 1, height - 1),
               attribute("fill", "none"), attribute("stroke", color), "/>\n");
}

void Svg::circle(double x, double y, double radius, Fill fill, std::string_view outline,
                 std::string_view tooltip) {
  body_ += cat("<circle", attribute("cx", coord(x)), attribute("cy", coord(y)),
               attribute("r", coord(radius)), fill_attribute(fill),
               outline.empty() ? "" : attribute("stroke", outline), element_end("circle", tooltip));
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

void Svg::bars(const std::vector<Bar>& bars, double y, double height, Fill fill) {
  if (bars.empty()) return;
  body_ += cat("<path", fill_attribute(fill), " d=\"");
  for (const Bar& bar : bars) {
    body_ += cat('M', coord(bar.x), ' ', coord(y), 'h', coord(bar.width), 'v', coord(height), 'h',
                 coord(-bar.width), 'z');
  }
  body_ += "\"/>\n";
}

void Svg::area(double x, double column, const std::vector<double>& top,
               const std::vector<double>& bottom, Fill fill) {
  if (top.empty()) return;
  body_ += cat("<path", fill_attribute(fill), " d=\"M", coord(x), ' ', coord(bottom.front()));
  const auto at = [&](std::size_t i) { return coord(x + column * static_cast<double>(i)); };
  for (std::size_t i = 0; i < top.size(); ++i) body_ += cat('V', coord(top[i]), 'H', at(i + 1));
  for (std::size_t i = bottom.size(); i > 0; --i) {
    body_ += cat('V', coord(bottom[i - 1]), 'H', at(i - 1));
  }
  body_ += "z\"/>\n";
}

std::string Svg::definitions() const {
  if (hatched_.empty()) return "";
  std::string s = "<defs>\n";
  for (const std::string& color : hatched_) {
    s += cat("<pattern", attribute("id", pattern_name(color)),
             " width=\"5\" height=\"5\" patternUnits=\"userSpaceOnUse\""
             " patternTransform=\"rotate(45)\"><rect width=\"5\" height=\"5\"",
             attribute("fill", color),
             "/><rect width=\"1.6\" height=\"5\" fill=\"#ffffff\" fill-opacity=\"0.55\"/>"
             "</pattern>\n");
  }
  return s + "</defs>\n";
}

std::string Svg::document(double width, double height, std::string_view title,
                          std::string_view description) const {
  return cat(
      "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<svg xmlns=\"http://www.w3.org/2000/svg\"",
      attribute("width", coord(width)), attribute("height", coord(height)),
      attribute("viewBox", "0 0 " + coord(width) + " " + coord(height)), attribute("role", "img"),
      attribute("font-family",
                "'Helvetica Neue', Arial, Helvetica, 'Liberation Sans', 'DejaVu Sans', sans-serif"),
      ">\n<title>", escaped(title), "</title>\n<desc>", escaped(description), "</desc>\n",
      definitions(), "<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n", body_,
      "</svg>\n");
}

}  // namespace uniep::trace
