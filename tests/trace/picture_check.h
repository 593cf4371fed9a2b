#pragma once

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/check.h"
#include "trace/color_vision.h"
#include "trace/text.h"
#include "trace/xml.h"

namespace uniep::trace {

struct Box {
  double left = 0, top = 0, right = 0, bottom = 0;

  bool within(const Box& o) const {
    return left >= o.left - 0.01 && top >= o.top - 0.01 && right <= o.right + 0.01 &&
           bottom <= o.bottom + 0.01;
  }
  bool meets(const Box& o) const {
    return left < o.right && o.left < right && top < o.bottom && o.top < bottom;
  }
};

/// How far a text reaches above and below its baseline, in units of its size.
inline constexpr double kAscent = 0.78;
inline constexpr double kDescent = 0.24;

/// What is wrong with a picture, as a reader of it would see: broken XML, no title, numbers that
/// are none, shapes or text beyond its edges, text on text, text that does not stand out.
class PictureCheck {
 public:
  static std::vector<std::string> faults(const std::string& svg) {
    PictureCheck check;
    try {
      check.root(XmlReader::read(svg));
    } catch (const std::runtime_error& e) {
      check.faults_.emplace_back(e.what());
    }
    return check.faults_;
  }

 private:
  struct Text {
    Box box;
    std::string words;
  };

  void fault(const std::string& what) { faults_.push_back(what); }

  static double number(const std::string& text) {
    char* end = nullptr;
    const double value = std::strtod(text.c_str(), &end);
    const bool whole = !text.empty() && *end == '\0' && std::isfinite(value);
    if (!whole) throw std::runtime_error("no number: " + text);
    return value;
  }
  static double number(const XmlElement& e, const char* key) {
    const auto found = e.attributes.find(key);
    if (found == e.attributes.end()) throw std::runtime_error(cat("<", e.name, "> has no ", key));
    return number(found->second);
  }
  static std::string value(const XmlElement& e, const char* key) {
    const auto found = e.attributes.find(key);
    return found == e.attributes.end() ? "" : found->second;
  }

  void root(const XmlElement& svg) {
    if (svg.name != "svg") fault("the root is <" + svg.name + ">");
    if (value(svg, "xmlns") != "http://www.w3.org/2000/svg") fault("not in SVG's namespace");
    page_ = {0, 0, number(svg, "width"), number(svg, "height")};
    if (value(svg, "viewBox") != cat("0 0 ", value(svg, "width"), ' ', value(svg, "height"))) {
      fault("viewBox " + value(svg, "viewBox"));
    }
    const auto& parts = svg.children;
    if (parts.size() < 3 || parts[0].name != "title" || parts[0].text.empty()) fault("no title");
    if (parts.size() < 3 || parts[1].name != "desc") fault("no description");
    for (const XmlElement& e : parts) element(e);
  }

  void element(const XmlElement& e) {
    for (const auto& [key, text] : e.attributes) {
      if (text.find("nan") != std::string::npos || text.find("inf") != std::string::npos) {
        fault(cat("<", e.name, " ", key, "=\"", text, "\">"));
      }
    }
    if (e.name == "rect") rect(e);
    if (e.name == "line") line(e);
    if (e.name == "circle") circle(e);
    if (e.name == "path") path(value(e, "d"));
    if (e.name == "text") text(e);
  }

  /// Colour of "#rrggbb" and of a pattern that is named by its colour; nothing of "none".
  static std::string color_of(const std::string& fill) {
    const std::size_t pattern = fill.find("hatched-");
    if (pattern != std::string::npos) return '#' + fill.substr(pattern + 8, 6);
    return fill == "none" ? "" : fill;
  }

  void rect(const XmlElement& e) {
    if (value(e, "width") == "100%") return;
    const double x = number(e, "x"), y = number(e, "y");
    const Box box{x, y, x + number(e, "width"), y + number(e, "height")};
    if (!box.within(page_)) fault(cat("<rect> beyond the edge: ", x, ' ', y));
    const std::string color = color_of(value(e, "fill"));
    if (!color.empty()) grounds_.emplace_back(box, color);
  }

  void line(const XmlElement& e) {
    const double x1 = number(e, "x1"), x2 = number(e, "x2");
    const double y1 = number(e, "y1"), y2 = number(e, "y2");
    const Box box{std::min(x1, x2), std::min(y1, y2), std::max(x1, x2), std::max(y1, y2)};
    if (!box.within(page_)) fault(cat("<line> beyond the edge: ", x1, ' ', y1));
  }

  void circle(const XmlElement& e) {
    const double x = number(e, "cx"), y = number(e, "cy"), r = number(e, "r");
    if (!Box{x - r, y - r, x + r, y + r}.within(page_)) fault("<circle> beyond the edge");
  }

  /// Its numbers; where they lead is seen from those with an upper-case letter.
  void path(const std::string& d) {
    if (d.find_first_not_of("MHVhvz0123456789.- ") != std::string::npos) fault("path " + d);
    for (std::size_t i = 0; i < d.size(); ++i) {
      const bool across = d[i] == 'H' || d[i] == 'M', down = d[i] == 'V';
      if (!across && !down) continue;
      const double at = std::strtod(d.c_str() + i + 1, nullptr);
      if (at < 0 || at > (across ? page_.right : page_.bottom)) fault(cat("path to ", at));
    }
  }

  Box text_box(const XmlElement& e) {
    const double size = number(e, "font-size");
    const TextStyle style{.size = size, .bold = value(e, "font-weight") == "bold"};
    const double width = text_width(e.text, style);
    const std::string anchor = value(e, "text-anchor");
    const double before = anchor == "end" ? width : anchor == "middle" ? width / 2 : 0;
    double x = 0, y = 0;
    const std::string turned = value(e, "transform");
    if (turned.empty()) {
      x = number(e, "x"), y = number(e, "y");
      return {x - before, y - kAscent * size, x - before + width, y + kDescent * size};
    }
    if (std::sscanf(turned.c_str(), "translate(%lf %lf) rotate(-90)", &x, &y) != 2) {
      fault("transform " + turned);
    }
    return {x - kAscent * size, y - width + before, x + kDescent * size, y + before};
  }

  void text(const XmlElement& e) {
    const Text own{text_box(e), e.text};
    if (e.text.empty()) fault("an empty <text>");
    if (number(e, "font-size") < 9) fault("too small: " + e.text);
    if (!own.box.within(page_)) fault("beyond the edge: " + e.text);
    for (const Text& other : texts_) {
      if (own.box.meets(other.box)) fault(cat(e.text, " on ", other.words));
    }
    const std::string ink = value(e, "fill");
    for (const auto& [box, color] : grounds_) {
      if (box.meets(own.box) && contrast(ink, color) < 4.5) fault(cat(e.text, " on ", color));
    }
    if (contrast(ink, "#ffffff") < 4.5) fault(e.text + " does not stand out");
    for (const char* word : {"nan", "inf", "-nan", "-inf"}) {
      if ((' ' + e.text + ' ').find(cat(' ', word, ' ')) != std::string::npos) {
        fault("no number in " + e.text);
      }
    }
    texts_.push_back(own);
  }

  Box page_;
  std::vector<Text> texts_;
  std::vector<std::pair<Box, std::string>> grounds_;
  std::vector<std::string> faults_;
};

/// In one text, for EXPECT_EQ(picture_faults(svg), "").
inline std::string picture_faults(const std::string& svg) {
  std::string all;
  for (const std::string& fault : PictureCheck::faults(svg)) all += fault + '\n';
  return all;
}

}  // namespace uniep::trace
