#include "trace/plot.h"

#include <gtest/gtest.h>

#include <numeric>
#include <string>
#include <vector>

#include "base/check.h"
#include "trace/made_up_run.h"
#include "trace/picture_check.h"
#include "trace/utf8.h"

namespace uniep::trace {
namespace {

bool has(const std::string& svg, const std::string& text) {
  return svg.find(text) != std::string::npos;
}

PlotInput plot_of(int ranks, int workers, int experts) {
  PlotInput input;
  input.page = {.title = "layer <A & \"B\">", .notes = {"a note"}, .schedule = "launch=single"};
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

TEST(Plot, IsSoundForAnySize) {
  for (const auto& [ranks, workers, experts] :
       {std::array{1, 1, 1}, {4, 1, 32}, {8, 3, 256}, {64, 1, 512}}) {
    EXPECT_EQ(picture_faults(draw_plot(plot_of(ranks, workers, experts))), "") << ranks;
  }
}

TEST(Plot, SaysWhereThereIsNothingToDraw) {
  PlotInput no_rows;
  no_rows.rows_per_expert = {0, 0};
  no_rows.passes = {{PassStats{}}};
  no_rows.timeline = {{TimelineEvent{}}};
  no_rows.page.title = "none";
  const std::string svg = draw_plot(no_rows);
  EXPECT_EQ(picture_faults(svg), "");
  for (const char* words :
       {"no expert has a row", "no stage took any time", "no worker had a task"}) {
    EXPECT_TRUE(has(svg, words)) << words;
  }
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
  EXPECT_TRUE(has(
      svg,
      "min 0, median 4.5, max 11 rows; mean 5, max / mean 2.2; without rows (red, below the axis): "
      "expert 1"));
  EXPECT_TRUE(has(svg, "expert 3, rank 1: 11 rows"));
}

TEST(Plot, NamesStagesRanksAndPasses) {
  const std::string svg = draw_plot(plot_of(2, 2, 4));
  for (const char* word : {">forward<", ">backward<", ">dispatch<", ">fc1<", ">dfc2<", ">wgrad2<",
                           ">rank 1<", ">without a task<", "worker time, \u00b5s", "forward, 751",
                           "fc1, rank 1: ", "dfc2, rank 0: "}) {
    EXPECT_TRUE(has(svg, word)) << word;
  }
  EXPECT_FALSE(has(svg, ">dfc1<")) << "a stage that did not run";
}

TEST(Plot, StaysSmallForManyTasks) {
  PlotInput input = plot_of(1, 1, 4);
  input.timeline = MadeUpRun{.tasks = 200'000}.timeline();
  EXPECT_LT(draw_plot(input).size(), 200'000u);
}

TEST(Plot, OfManyRanksChoosesSomeAndSaysWhich) {
  const std::string svg = draw_plot(plot_of(64, 3, 64));
  for (const char* words : {">min<", ">med<", ">max<", "all 192 workers of 64 ranks", "the fastest",
                            "the median", "the slowest", "of 64 ranks those with the least"}) {
    EXPECT_TRUE(has(svg, words)) << words;
  }
  EXPECT_LT(svg.size(), 300'000u);
  EXPECT_FALSE(has(draw_plot(plot_of(8, 3, 64)), "fastest"));
}

TEST(Plot, ShowsTheLeastMedianAndMostTimeOfManyRanks) {
  PlotInput input = plot_of(9, 1, 9);
  for (std::size_t r = 0; r < 9; ++r) {  // rank 0 took 5 s, 1 took 6 s, ..., 4 took 0 s, ...
    input.passes[0][r][Stage::kFc1] = {1, static_cast<double>((r + 5) % 9), 0, 0};
  }
  const std::string svg = draw_plot(input);
  for (const auto& [rank, shown] : {std::pair{3, true}, {8, true}, {0, false}, {7, false}}) {
    EXPECT_EQ(has(svg, cat("fc1, rank ", rank, ": ")), shown) << rank;
  }
}

TEST(Plot, ChoosesRanksByTheTimeTheyTook) {
  PlotInput input = plot_of(9, 1, 9);
  input.timeline[3].back().end_ns += 1'000'000'000;  // of the backward pass
  const std::string svg = draw_plot(input);
  const std::size_t backward = svg.rfind(">backward, ");
  EXPECT_NE(svg.find("rank 3, the slowest: 1", backward), std::string::npos);
}

TEST(Plot, SumsUpManyExperts) {
  PlotInput input = plot_of(1, 1, 2000);
  EXPECT_TRUE(has(draw_plot(input), "a bar stands for 8 experts"));
  EXPECT_FALSE(has(draw_plot(plot_of(1, 1, 256)), "a bar stands for"));
}

}  // namespace
}  // namespace uniep::trace
