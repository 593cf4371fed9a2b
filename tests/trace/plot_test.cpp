#include "trace/plot.h"

#include <gtest/gtest.h>

#include <cctype>
#include <numeric>
#include <string>
#include <vector>

#include "base/check.h"
#include "trace/made_up_run.h"
#include "trace/svg.h"
#include "trace/utf8.h"

namespace uniep::trace {
namespace {

/// Why `xml` is not well-formed, as far as a plot could break it: tags that do not match, text or
/// attributes with bare special characters, numbers that are none. Empty when all is well.
std::string xml_fault(const std::string& xml) {
  std::vector<std::string> open;
  std::size_t i = 0;
  while (i < xml.size()) {
    if (xml[i] != '<') {
      const std::size_t end = std::min(xml.find('<', i), xml.size());
      for (; i < end; ++i) {
        if (xml[i] == '>') return "bare > in text";
        if (xml[i] == '&' && xml.find(';', i) - i > 6) return "bare & in text";
        for (const char* number : {"nan", "inf"}) {
          const auto letter = [&](std::size_t at) {
            return at < xml.size() && std::isalpha(static_cast<unsigned char>(xml[at])) != 0;
          };
          if (xml.compare(i, 3, number) == 0 && !letter(i - 1) && !letter(i + 3)) {
            return cat("no number in text: ", xml.substr(i, end - i));
          }
        }
      }
      continue;
    }
    const std::size_t end = xml.find('>', i);
    if (end == std::string::npos) return "a tag does not end";
    const std::string tag = xml.substr(i + 1, end - i - 1);
    i = end + 1;
    if (tag.starts_with("?")) continue;
    if (std::count(tag.begin(), tag.end(), '"') % 2 != 0) return "unbalanced quotes in " + tag;
    if (tag.find('<') != std::string::npos) return "bare < in " + tag;
    if (tag.find("nan") != std::string::npos || tag.find("inf") != std::string::npos) {
      return "no number in " + tag;
    }
    if (tag.starts_with("/")) {
      if (open.empty() || open.back() != tag.substr(1)) return "unexpected <" + tag + ">";
      open.pop_back();
    } else if (!tag.ends_with("/")) {
      open.push_back(tag.substr(0, tag.find(' ')));
    }
  }
  return open.empty() ? "" : "<" + open.back() + "> is never closed";
}

PlotInput plot_of(int ranks, int workers, int experts) {
  PlotInput input;
  input.title = "layer <A & \"B\">";
  input.notes = {"a note"};
  input.schedule = "launch=single";
  input.num_ranks = ranks;
  input.rows_per_expert.resize(static_cast<std::size_t>(experts));
  std::iota(input.rows_per_expert.begin(), input.rows_per_expert.end(), 0);
  const MadeUpRun forward{.ranks = ranks, .workers = workers, .tasks = 30};
  const MadeUpRun backward{.ranks = ranks,
                           .workers = workers,
                           .tasks = 30,
                           .pass = Pass::kBackward,
                           .start_ns = 9'000'000'000};
  input.passes = {forward.stats(), backward.stats()};
  input.timeline = forward.timeline();
  const auto more = backward.timeline();
  for (std::size_t r = 0; r < more.size(); ++r) {
    input.timeline[r].insert(input.timeline[r].end(), more[r].begin(), more[r].end());
  }
  return input;
}

bool has(const std::string& svg, const std::string& text) {
  return svg.find(text) != std::string::npos;
}

TEST(Plot, IsWellFormedForAnySize) {
  for (const auto& [ranks, workers, experts] :
       {std::array{1, 1, 1}, {4, 1, 32}, {8, 3, 256}, {64, 1, 512}}) {
    EXPECT_EQ(xml_fault(draw_plot(plot_of(ranks, workers, experts))), "") << ranks;
  }
}

TEST(Plot, IsWellFormedWhenThereIsNothingToShow) {
  EXPECT_EQ(xml_fault(draw_plot({})), "");
  PlotInput no_rows;
  no_rows.rows_per_expert = {0, 0};
  no_rows.passes = {{PassStats{}}};
  no_rows.timeline = {{TimelineEvent{}}};
  EXPECT_EQ(xml_fault(draw_plot(no_rows)), "");
}

TEST(Plot, EscapesTextAndHasAGroundOfItsOwn) {
  const std::string svg = draw_plot(plot_of(2, 1, 4));
  EXPECT_TRUE(has(svg, "layer &lt;A &amp; &quot;B&quot;&gt;"));
  EXPECT_TRUE(has(svg, "<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>"));
  EXPECT_FALSE(has(svg, "<script"));
  EXPECT_FALSE(has(svg, "href"));
}

TEST(Utf8, WhatIsNoCharacterIsReplacedByteByByte) {
  const std::string mark = "\xef\xbf\xbd";
  EXPECT_EQ(to_utf8("a\xc3\xa9\xe2\x82\xac\xf0\x9f\x99\x82z"),
            "a\xc3\xa9\xe2\x82\xac\xf0\x9f\x99\x82z");
  EXPECT_EQ(to_utf8("\xff"), mark);
  EXPECT_EQ(to_utf8("x\xc3"), "x" + mark) << "cut short";
  EXPECT_EQ(to_utf8("\xc0\xaf"), mark + mark) << "longer than it needs to be";
  EXPECT_EQ(to_utf8("\xed\xa0\x80"), mark + mark + mark) << "half of a pair";
  EXPECT_EQ(to_utf8("\xf4\x90\x80\x80"), mark + mark + mark + mark) << "beyond the last";
}

TEST(Plot, SaysLoadStatisticsAndNamesEmptyExperts) {
  PlotInput input = plot_of(2, 1, 4);
  input.rows_per_expert = {7, 0, 2, 11};
  const std::string svg = draw_plot(input);
  EXPECT_TRUE(has(svg,
                  "min 0, median 4.5, max 11 rows; mean 5, max / mean 2.2; without rows (red): "
                  "expert 1"));
  EXPECT_TRUE(has(svg, "expert 3, rank 1: 11 rows"));
}

TEST(Plot, NamesStagesRanksAndPasses) {
  const std::string svg = draw_plot(plot_of(2, 2, 4));
  for (const char* word :
       {">forward<", ">backward<", ">dispatch<", ">fc1<", ">dfc2<", ">wgrad2<", ">rank 1<",
        ">idle<", "worker time, \u00b5s", "forward, 751", "fc1, rank 1: ", "dfc2, rank 0: "}) {
    EXPECT_TRUE(has(svg, word)) << word;
  }
  EXPECT_FALSE(has(svg, ">dfc1<")) << "a stage that did not run";
}

TEST(Plot, StaysSmallForManyTasks) {
  PlotInput input = plot_of(1, 1, 4);
  input.timeline = MadeUpRun{.tasks = 200'000}.timeline();
  EXPECT_LT(draw_plot(input).size(), 200'000u);
}

TEST(TickStep, IsRound) {
  EXPECT_DOUBLE_EQ(tick_step(10, 5), 2);
  EXPECT_DOUBLE_EQ(tick_step(11, 5), 5);
  EXPECT_DOUBLE_EQ(tick_step(0.9, 5), 0.2);
  EXPECT_DOUBLE_EQ(tick_step(0, 5), 1);
  EXPECT_DOUBLE_EQ(tick_step(26, 5), 10);
}

TEST(ShortTime, PicksAUnit) {
  EXPECT_EQ(short_time(12e-6), "12 \u00b5s");
  EXPECT_EQ(short_time(12.34e-3), "12.3 ms");
  EXPECT_EQ(short_time(75), "75 s");
}

}  // namespace
}  // namespace uniep::trace
