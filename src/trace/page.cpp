#include "trace/page.h"

#include <algorithm>

#include "trace/palette.h"

namespace uniep::trace {
namespace {

constexpr TextStyle kTitle{20, kTextColor, Anchor::kStart, true};
constexpr TextStyle kPanelTitle{15, kTextColor, Anchor::kStart, true};
constexpr TextStyle kNote{12, kMutedColor};
constexpr TextStyle kKeyWord{12, kTextColor};
constexpr double kSwatch = 12;

void draw_swatch(Svg& svg, double x, double y, const Key& key) {
  if (key.round) {
    svg.circle(x + kSwatch / 2, y + kSwatch / 2, kSwatch / 2, key.fill);
    return;
  }
  svg.rect(x, y, kSwatch, kSwatch, key.fill);
  const bool faint = key.fill.color == kIdleColor || key.fill.color == kBandColor;
  if (faint) svg.frame(x, y, kSwatch, kSwatch, kAxisColor);
}

double line_height(const TextStyle& style) { return 1.4 * style.size; }

}  // namespace

double draw_lines(Svg& svg, double x, double baseline, std::string_view text,
                  const TextStyle& style, double width) {
  for (const std::string& line : wrapped(text, style, width)) {
    svg.text(x, baseline, line, style);
    baseline += line_height(style);
  }
  return baseline;
}

double draw_head(Svg& svg, const PageText& page) {
  double y = draw_lines(svg, kMarginLeft, 34, page.title, kTitle) - 6;
  for (const std::string& note : page.notes) y = draw_lines(svg, kMarginLeft, y, note, kNote);
  return y + 4;
}

double draw_foot(Svg& svg, const PageText& page, double top) {
  if (page.schedule.empty()) return top + 8;
  return draw_lines(svg, kMarginLeft, top + 15, "schedule: " + page.schedule, kNote) + 2;
}

std::string document(const Svg& svg, const PageText& page, double height) {
  std::string description;
  for (const std::string& note : page.notes) {
    description += (description.empty() ? "" : ". ") + note;
  }
  return svg.document(kPlotWidth, height, page.title, description);
}

double draw_panel_title(Svg& svg, double top, std::string_view title, std::string_view caption) {
  svg.text(kMarginLeft, top + 16, title, kPanelTitle);
  return draw_lines(svg, kMarginLeft, top + 34, caption, kNote) - 3;
}

double draw_absence(Svg& svg, double top, std::string_view sentence) {
  constexpr double kHeight = 44;
  svg.rect(kMarginLeft, top, kInnerWidth, kHeight, kIdleColor);
  svg.text(kMarginLeft + kInnerWidth / 2, top + kHeight / 2 + 4, sentence,
           {13, kMutedColor, Anchor::kMiddle});
  return top + kHeight;
}

void draw_y_axis(Svg& svg, double left, double right, double top, double bottom, const Axis& axis,
                 std::string_view label) {
  constexpr TextStyle kTick{11, kMutedColor, Anchor::kEnd};
  double widest = 0;
  for (int i = 0; i * axis.step <= axis.end * (1 + 1e-9); ++i) {
    const double y = bottom - (bottom - top) * (i * axis.step / axis.end);
    const std::string tick = tick_label(i * axis.step, axis.step);
    widest = std::max(widest, text_width(tick, kTick));
    svg.line(left, y, right, y, i == 0 ? kAxisColor : kGridColor);
    svg.text(left - 8, y + 4, tick, kTick);
  }
  if (!label.empty()) {
    svg.vertical_text(left - widest - 20, (top + bottom) / 2, label, {12, kMutedColor});
  }
}

double key_width(const Key& key) { return kSwatch + 5 + text_width(key.word, kKeyWord) + 18; }

double draw_keys(Svg& svg, double x, double baseline, const std::vector<Key>& keys, double width) {
  double at = x;
  for (const Key& key : keys) {
    if (at > x && at + key_width(key) > x + width) {
      at = x;
      baseline += 18;
    }
    draw_swatch(svg, at, baseline - 10, key);
    for (const std::string& word : wrapped(key.word, kKeyWord, width - kSwatch - 5, 1)) {
      svg.text(at + kSwatch + 5, baseline, word, kKeyWord);
    }
    at += key_width(key);
  }
  return baseline + 18;
}

}  // namespace uniep::trace
