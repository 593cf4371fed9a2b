#include "trace/text.h"

#include <gtest/gtest.h>

#include <string>

#include "trace/numbers.h"

namespace uniep::trace {
namespace {

std::string joined(const std::vector<std::string>& lines) {
  std::string all;
  for (const std::string& line : lines) all += (all.empty() ? "" : "|") + line;
  return all;
}

TEST(TextWidth, IsThatOfTheWidestFont) {
  // DejaVu Sans 2.37, units of 1/2048: "fc1" takes 721 + 1126 + 1303.
  const double exact = 12.0 * (721 + 1126 + 1303) / 2048;
  EXPECT_GE(text_width("fc1", {.size = 12}), exact);
  EXPECT_LT(text_width("fc1", {.size = 12}), 1.05 * exact);
  EXPECT_GT(text_width("fc1", {.size = 12, .bold = true}), text_width("fc1", {.size = 12}));
  EXPECT_DOUBLE_EQ(text_width("fc1", {.size = 24}), 2 * text_width("fc1", {.size = 12}));
}

TEST(TextWidth, CountsCharactersNotBytes) {
  EXPECT_DOUBLE_EQ(text_width("\xe6\xbc\xa2", {}), text_width("\xff", {})) << "U+FFFD";
  EXPECT_LT(text_width("\u00b5s", {}), text_width("mms", {}));
}

TEST(Wrapped, BreaksBehindSpacesCommasAndSlashes) {
  const TextStyle style{.size = 10};
  const double room = text_width("aaaa bb", style);
  EXPECT_EQ(joined(wrapped("aaaa bb aaaa", style, room)), "aaaa bb|aaaa");
  EXPECT_EQ(joined(wrapped("aaaa,bb,aaaa", style, room)), "aaaa,|bb,aaaa");
  EXPECT_EQ(joined(wrapped("/aaa/bbbbbb", style, room)), "/aaa/|bbbbbb");
  EXPECT_EQ(joined(wrapped("aaaa", style, room)), "aaaa");
  EXPECT_EQ(joined(wrapped("", style, room)), "");
}

TEST(Wrapped, BreaksWordsThatAreTooLong) {
  const TextStyle style{.size = 10};
  EXPECT_EQ(joined(wrapped("aaaaaaaa", style, text_width("aaa", style))), "aaa|aaa|aa");
  EXPECT_EQ(joined(wrapped("\u6f22\u6f22\u6f22", style, text_width("\u6f22\u6f22", style))),
            "\u6f22\u6f22|\u6f22")
      << "between characters";
}

TEST(Wrapped, CutsWhatIsMoreThanItsLines) {
  const TextStyle style{.size = 10};
  const double room = text_width("aaa\u2026", style);
  const std::vector<std::string> lines = wrapped(std::string(100, 'a'), style, room, 2);
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_EQ(lines.back(), "aaa\u2026");
  for (const std::string& line : lines) EXPECT_LE(text_width(line, style), room);
}

TEST(TickStep, IsRound) {
  EXPECT_DOUBLE_EQ(tick_step(10, 5), 2);
  EXPECT_DOUBLE_EQ(tick_step(11, 5), 5);
  EXPECT_DOUBLE_EQ(tick_step(0.9, 5), 0.2);
  EXPECT_DOUBLE_EQ(tick_step(0, 5), 1);
  EXPECT_DOUBLE_EQ(tick_step(26, 5), 10);
}

TEST(AxisUpTo, EndsAtATick) {
  EXPECT_DOUBLE_EQ(axis_up_to(1024).end, 1200);
  EXPECT_DOUBLE_EQ(axis_up_to(1024).step, 200);
  EXPECT_DOUBLE_EQ(axis_up_to(0).end, 1);
  EXPECT_DOUBLE_EQ(axis_up_to(1, 1).step, 1) << "no fifth of a row";
  EXPECT_DOUBLE_EQ(axis_up_to(1e-320).end, 1);
}

TEST(TickLabel, TellsTicksApart) {
  EXPECT_EQ(tick_label(0, 0.5), "0");
  EXPECT_EQ(tick_label(1.5, 0.5), "1.5");
  EXPECT_EQ(tick_label(1, 0.5), "1.0");
  EXPECT_EQ(tick_label(112.2, 0.2), "112.2");
  EXPECT_EQ(tick_label(2000, 1000), "2000");
  EXPECT_EQ(tick_label(40'000, 20'000), "40k");
  EXPECT_EQ(tick_label(4e9, 2e9), "4000M");
  EXPECT_EQ(tick_label(3e10, 1e10), "30G");
}

TEST(ShortTime, PicksAUnit) {
  EXPECT_EQ(short_time(12e-9), "12 ns");
  EXPECT_EQ(short_time(12e-6), "12 \u00b5s");
  EXPECT_EQ(short_time(12.34e-3), "12.3 ms");
  EXPECT_EQ(short_time(75), "75 s");
}

}  // namespace
}  // namespace uniep::trace
