#include "trace/chrome_trace.h"

#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <utility>

#include "trace/made_up_run.h"

namespace uniep::trace {
namespace {

using nlohmann::json;

json written(const std::vector<std::vector<TimelineEvent>>& timeline,
             const TraceHeader& header = {}) {
  std::ostringstream out;
  write_chrome_trace(out, timeline, header);
  return json::parse(out.str());
}

std::vector<json> slices(const json& file, const std::string& name = "") {
  std::vector<json> found;
  for (const json& e : file["traceEvents"]) {
    if (e["ph"] == "X" && (name.empty() || e["name"] == name)) found.push_back(e);
  }
  return found;
}

TEST(ChromeTrace, OneSliceATaskWithItsArguments) {
  const json file = written(MadeUpRun{.ranks = 2, .workers = 3, .tasks = 4}.timeline());
  EXPECT_EQ(slices(file, "fc1").size(), 6u);
  EXPECT_EQ(slices(file, "reduce").size(), 6u);
  const json slice = slices(file, "fc1").front();
  EXPECT_EQ(slice["args"], json::parse(R"({"tile":11,"expert":1,"launch":1,"pass":"forward"})"));
  EXPECT_EQ(slice["dur"], 20.0);
}

TEST(ChromeTrace, ShowsWaitsBeforeAndLinkTimeInsideATask) {
  const json file = written(MadeUpRun{.tasks = 1}.timeline());
  const std::vector<json> all = slices(file);
  ASSERT_EQ(all.size(), 3u);
  EXPECT_EQ(all[0]["name"], "wait");
  EXPECT_EQ(all[0]["ts"], 0.0);
  EXPECT_EQ(all[0]["dur"], 5.0);
  EXPECT_EQ(all[1]["name"], "dispatch");
  EXPECT_EQ(all[1]["ts"], 5.0);
  EXPECT_EQ(all[2]["name"], "link");
  EXPECT_EQ(all[2]["ts"], 5.0) << "a dispatch task first awaits what it pulls";
  EXPECT_EQ(all[2]["dur"], 2.0);

  const std::vector<json> links = slices(written(MadeUpRun{.tasks = 2}.timeline()), "link");
  EXPECT_EQ(links.at(1)["ts"], 48.0) << "fc1 waits with its pushes, at its end";
}

TEST(ChromeTrace, LeavesOutPausesBelowAMicrosecond) {
  const json file = written(MadeUpRun{.wait_ns = 999, .link_ns = 999}.timeline());
  EXPECT_TRUE(slices(file, "wait").empty());
  EXPECT_TRUE(slices(file, "link").empty());
  EXPECT_EQ(slices(file).size(), 4u);
}

TEST(ChromeTrace, SlicesOfARowAreOrderedNonNegativeAndNest) {
  const json file = written(MadeUpRun{.ranks = 3, .workers = 2, .tasks = 50}.timeline());
  std::map<std::pair<int, int>, double> row_end;
  for (const json& s : slices(file)) {
    const double begin = s["ts"];
    const double end = begin + s["dur"].get<double>();
    EXPECT_GE(begin, 0);
    EXPECT_GE(end, begin);
    double& last = row_end[{s["pid"], s["tid"]}];
    if (s["name"] == "link") {
      EXPECT_LE(end, last + 1e-6) << "a link slice lies inside its task";
    } else {
      EXPECT_GE(begin, last - 1e-6);
      last = end;
    }
  }
  EXPECT_EQ(row_end.size(), 6u);
}

TEST(ChromeTrace, TimesAreRelativeToTheEarliestEventOfAnyRank) {
  auto timeline = MadeUpRun{.ranks = 2, .tasks = 1}.timeline();
  std::swap(timeline[0], timeline[1]);  // now rank 0 is the late one
  const json file = written(timeline);
  EXPECT_EQ(slices(file, "wait")[0]["ts"], 1.0);
  EXPECT_EQ(slices(file, "wait")[1]["ts"], 0.0);
}

TEST(ChromeTrace, EventsMayComeInAnyOrder) {
  auto timeline = MadeUpRun{.tasks = 9}.timeline();
  const json in_order = written(timeline);
  std::reverse(timeline[0].begin(), timeline[0].end());
  EXPECT_EQ(written(timeline), in_order);
}

TEST(ChromeTrace, NamesRowsByRankAndWorker) {
  const json file = written(MadeUpRun{.ranks = 2, .workers = 2}.timeline());
  std::vector<std::string> names;
  for (const json& e : file["traceEvents"]) {
    if (e["name"] == "process_name" || e["name"] == "thread_name") {
      names.push_back(e["args"]["name"]);
    }
  }
  EXPECT_EQ(names, (std::vector<std::string>{"rank 0", "worker 0", "worker 1", "rank 1", "worker 0",
                                             "worker 1"}));
}

TEST(ChromeTrace, StageColorsDoNotDependOnTheFile) {
  const json one = written(MadeUpRun{}.timeline());
  const json other = written(MadeUpRun{.ranks = 2, .tasks = 2}.timeline());
  EXPECT_EQ(slices(one, "fc1")[0]["cname"], slices(other, "fc1")[0]["cname"]);
  EXPECT_NE(slices(one, "fc1")[0]["cname"], slices(one, "fc2")[0]["cname"]);
}

TEST(ChromeTrace, EachStageHasItsOwnColor) {
  std::vector<std::vector<TimelineEvent>> timeline(1);
  for (int i = 0; i < kNumStages; ++i) {
    TimelineEvent e;
    e.stage = static_cast<Stage>(i);
    if (e.stage == Stage::kPlan) continue;  // has that of kEnter
    e.begin_ns = e.ready_ns = 1000 * i;
    e.end_ns = e.begin_ns + 1000;
    timeline[0].push_back(e);
  }
  const json file = written(timeline);
  std::set<std::string> colors{"grey", "yellow"};  // of waits and of the link
  for (const TimelineEvent& e : timeline[0]) {
    const auto slice = slices(file, name(e.stage));
    ASSERT_EQ(slice.size(), 1u) << name(e.stage);
    EXPECT_TRUE(colors.insert(slice[0]["cname"]).second) << name(e.stage);
  }
}

TEST(ChromeTrace, HeaderKeepsTheRunEvenWhereItsTextIsHostile) {
  const json file = written({}, {.version = "1.2",
                                 .machine = "a \"quoted\" CPU",
                                 .command = "run \xff\n--x",
                                 .schedule = "launch=single"});
  EXPECT_EQ(file["otherData"]["machine"], "a \"quoted\" CPU");
  EXPECT_EQ(file["otherData"]["schedule"], "launch=single");
  EXPECT_TRUE(file["traceEvents"].empty());
}

TEST(ChromeTrace, InconsistentTimesNeverGiveNegativeSlices) {
  TimelineEvent e;
  e.begin_ns = 5000;
  e.ready_ns = 1000;
  e.end_ns = 3000;
  e.link_ns = 900'000;
  for (const json& s : slices(written({{e}}))) {
    EXPECT_GE(s["ts"].get<double>(), 0);
    EXPECT_GE(s["dur"].get<double>(), 0);
  }
}

}  // namespace
}  // namespace uniep::trace
