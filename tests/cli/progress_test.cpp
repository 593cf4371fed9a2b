#include "common/progress.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "common/text_columns.h"

namespace uniep::tool {
namespace {

constexpr WorkDone kHalf{.done = 5, .total = 10, .elapsed_s = 17};
constexpr WorkDone kNothingYet{.done = 0, .total = 10, .elapsed_s = 3};

TEST(ProgressBar, ShowsShareAndTimeLeft) {
  EXPECT_EQ(progress_bar("running", kHalf, 46), "running [##########..........] 50 %, 17 s left");
}

TEST(ProgressBar, NeverExceedsItsColumns) {
  for (const std::string label : {"", "x", "running 2 ranks",
                                  "messen: Gr\xc3\xb6\xc3\x9f"
                                  "e \xe5\xb1\xa4",
                                  "a label of some sixty letters, which no small terminal holds"}) {
    for (const WorkDone& work :
         {kHalf, kNothingYet, WorkDone{0, 0, 1e7}, WorkDone{1, 1000000, 86400}}) {
      for (std::size_t columns = 0; columns < 140; ++columns) {
        EXPECT_LE(columns_of(progress_bar(label, work, columns)), columns) << label;
        EXPECT_LE(columns_of(progress_sentence(label, work, columns)), columns) << label;
      }
    }
  }
}

TEST(ProgressBar, ShrinksTheBarFirstAndThenTheLabel) {
  const std::string label = "running 2 ranks";
  const auto cells = [&](std::size_t columns) {
    const std::string line = progress_bar(label, kHalf, columns);
    return std::ranges::count_if(line, [](char c) { return c == '#' || c == '.'; });
  };
  EXPECT_EQ(cells(200), 30);
  for (std::size_t columns = 31; columns < 80; ++columns) {
    const std::string line = progress_bar(label, kHalf, columns);
    EXPECT_TRUE(line.starts_with(label)) << columns;
    EXPECT_TRUE(line.ends_with("50 %, 17 s left")) << columns;
    EXPECT_LE(cells(columns), cells(columns + 1));
  }
  EXPECT_EQ(cells(31), 0);
  EXPECT_EQ(progress_bar(label, kHalf, 20), "run\xe2\x80\xa6 50 %, 17 s left");
}

TEST(ProgressBar, ShowsTheTimeWhereNoShareIsKnown) {
  EXPECT_EQ(progress_bar("measuring", kNothingYet, 80), "measuring 3 s");
  EXPECT_EQ(progress_bar("measuring", {0, 0, 75}, 80), "measuring 1:15");
  EXPECT_EQ(progress_sentence("measuring", kNothingYet, 80), "measuring: 3 s");
}

TEST(ProgressBar, MoreThanAllIsAll) {
  EXPECT_TRUE(progress_bar("", {12, 10, 5}, 80).ends_with(" 100 %, 0 s left"));
}

TEST(DurationText, IsShort) {
  EXPECT_EQ(duration_text(0.9), "0 s");
  EXPECT_EQ(duration_text(59.9), "59 s");
  EXPECT_EQ(duration_text(60), "1:00");
  EXPECT_EQ(duration_text(3723), "1:02:03");
  EXPECT_LE(duration_text(1e300).size(), 12u);
}

TEST(TextColumns, CountsWhatATerminalShows) {
  EXPECT_EQ(columns_of("abc"), 3u);
  EXPECT_EQ(columns_of("\xc3\xa4\xe2\x80\xa6"), 2u);  // ä…
  EXPECT_EQ(columns_of("\xe5\xb1\xa4"), 2u);          // 層
  EXPECT_EQ(columns_of("a\xcc\x88"), 1u);             // a and a combining diaeresis
  EXPECT_EQ(columns_of("\xff\x80"
                       "a"),
            3u);  // no characters
  EXPECT_EQ(columns_of("\xe5\xb1"), 2u) << "half of one";
}

TEST(TextColumns, CutsBetweenCharacters) {
  EXPECT_EQ(cut_to_columns("abc", 3), "abc");
  EXPECT_EQ(cut_to_columns("abcd", 3), "ab\xe2\x80\xa6");
  EXPECT_EQ(cut_to_columns("\xe5\xb1\xa4\xe5\xb1\xa4", 3), "\xe5\xb1\xa4\xe2\x80\xa6");
  EXPECT_EQ(cut_to_columns("\xe5\xb1\xa4\xe5\xb1\xa4", 2), "\xe2\x80\xa6");
  EXPECT_EQ(cut_to_columns("ab", 0), "");
}

}  // namespace
}  // namespace uniep::tool
