#include <algorithm>
#include <array>
#include <span>
#include <vector>

#include "base/check.h"
#include "trace/activity.h"
#include "trace/numbers.h"
#include "trace/palette.h"
#include "trace/panels.h"

namespace uniep::trace {
namespace {

// Tasks are far more and far shorter than pixels, so a row is drawn as columns of half a pixel,
// each in the colour of what took most of its time.
constexpr double kColumnWidth = 0.5;
constexpr auto kColumns = static_cast<std::size_t>(kInnerWidth / kColumnWidth);

/// Rows of a pass: more are thinner than can be told apart.
constexpr std::size_t kMostRows = 64;
/// Rows of one rank where only some ranks have rows.
constexpr std::size_t kRowsOfChosen = 12;

constexpr std::string_view kTitle = "Timeline";
constexpr TextStyle kHeading{12, kMutedColor, Anchor::kStart, true};
constexpr TextStyle kWorkerNumber{9, kMutedColor, Anchor::kEnd};

/// One pass, and where its drawing stands.
struct PassTimeline {
  Pass pass = Pass::kForward;
  std::vector<WorkerRow> workers;  ///< by rank
  TimeSpan span;

  double seconds() const { return 1e-9 * static_cast<double>(span.end_ns - span.begin_ns); }
};

/// Work fills a row's height, waiting a part of it: a second sign beside the colour.
double height_share(std::size_t activity) {
  return activity == kWait ? 0.35 : activity == kLink ? 0.65 : 1;
}

void draw_row(Svg& svg, const WorkerRow& row, const TimeSpan& span, double y, double height) {
  Activity activity(span, kColumns);
  for (const TimelineEvent& e : row.events) activity.add(e);
  std::array<std::vector<Svg::Bar>, kActivities> bars;
  for (std::size_t c = 0; c < kColumns;) {
    const std::size_t kind = activity.dominant(c);
    const std::size_t first = c;
    while (c < kColumns && activity.dominant(c) == kind) ++c;
    if (kind == kIdle) continue;
    bars[kind].push_back({kMarginLeft + kColumnWidth * static_cast<double>(first),
                          kColumnWidth * static_cast<double>(c - first)});
  }
  svg.rect(kMarginLeft, y, kInnerWidth, height, kIdleColor);
  for (std::size_t kind = 0; kind < kActivities; ++kind) {
    const double own = height * height_share(kind);
    svg.bars(bars[kind], y + height - own, own, activity_fill(kind));
  }
}

double row_height(std::size_t rows) { return rows <= 8 ? 16 : rows <= 40 ? 11 : 7; }

/// Rows, numbered where they are high enough; returns where they end.
double draw_rows(Svg& svg, std::span<const WorkerRow> rows, const TimeSpan& span, double top,
                 double height) {
  double y = top;
  for (const WorkerRow& row : rows) {
    draw_row(svg, row, span, y, height);
    if (height >= 11) {
      svg.text(kMarginLeft - 6, y + height / 2 + 3.5, cat(row.worker), kWorkerNumber);
    }
    y += height + 1;
  }
  return y;
}

/// The rows of each rank as a group.
std::vector<std::span<const WorkerRow>> by_rank(const std::vector<WorkerRow>& rows) {
  std::vector<std::span<const WorkerRow>> groups;
  for (std::size_t begin = 0; begin < rows.size();) {
    std::size_t end = begin;
    while (end < rows.size() && rows[end].rank == rows[begin].rank) ++end;
    groups.emplace_back(rows.data() + begin, end - begin);
    begin = end;
  }
  return groups;
}

void draw_time_axis(Svg& svg, double top, double bottom, double seconds) {
  const TimeUnit unit = time_unit(seconds);
  const double end = seconds * unit.per_second;
  const double step = tick_step(end, 12);
  for (int i = 0; i * step <= end * (1 + 1e-9); ++i) {
    const double x = kMarginLeft + kInnerWidth * (i * step / end);
    svg.line(x, top, x, bottom + 4, kAxisColor, 0.5);
    svg.text(x, bottom + 16, tick_label(i * step, step), {11, kMutedColor, Anchor::kMiddle});
  }
  svg.text(kMarginLeft + kInnerWidth / 2, bottom + 33,
           cat("time since the first task of the pass, ", unit.name),
           {12, kMutedColor, Anchor::kMiddle});
}

/// The text that not all workers have a row; empty if they have.
std::string sampling_text(std::size_t shown, std::size_t all) {
  return shown < all ? cat("; ", shown, " of ", all, " workers") : "";
}

/// All workers of a few ranks, or as many of each as there is room for.
double draw_each_rank(Svg& svg, const PassTimeline& p, double top) {
  const std::size_t ranks = by_rank(p.workers).size();
  const std::vector<WorkerRow> rows =
      sampled_rows(p.workers, std::max<std::size_t>(4, kMostRows / ranks));
  svg.text(kMarginLeft, top + 10,
           cat(name(p.pass), ", ", short_time(p.seconds()),
               sampling_text(rows.size(), p.workers.size())),
           kHeading);
  const double height = row_height(rows.size());
  double y = top + 18;
  int widest = 0;
  for (const WorkerRow& row : rows) widest = std::max(widest, row.worker);
  const double numbers = height >= 11 ? text_width(cat(widest), kWorkerNumber) + 6 : 0;
  for (const auto& group : by_rank(rows)) {
    const double end = draw_rows(svg, group, p.span, y, height);
    svg.text(kMarginLeft - numbers - 8, (y + end) / 2 + 3.5, cat("rank ", group.front().rank),
             {11, kMutedColor, Anchor::kEnd});
    y = end + 4;
  }
  draw_time_axis(svg, top + 18, y, p.seconds());
  return y + 38;
}

/// What all workers of all ranks are at, stacked over time.
double draw_all_workers(Svg& svg, const PassTimeline& p, double top) {
  constexpr double kHeight = 120;
  constexpr double kWide = 2;
  constexpr auto kCount = static_cast<std::size_t>(kInnerWidth / kWide);
  Activity activity(p.span, kCount);
  for (const WorkerRow& row : p.workers) {
    for (const TimelineEvent& e : row.events) activity.add(e);
  }
  const double bottom = top + kHeight;
  const double pixels = kHeight / static_cast<double>(p.workers.size());
  svg.rect(kMarginLeft, top, kInnerWidth, kHeight, kIdleColor);
  std::vector<double> lower(kCount, bottom);
  for (std::size_t kind = 0; kind < kActivities; ++kind) {
    std::vector<double> upper = lower;
    double sum = 0;
    for (std::size_t c = 0; c < kCount; ++c) {
      sum += activity.share(c, kind);
      upper[c] = std::max(top, lower[c] - pixels * activity.share(c, kind));
    }
    if (sum == 0) continue;
    svg.area(kMarginLeft, kWide, upper, lower, activity_fill(kind));
    lower = std::move(upper);
  }
  draw_y_axis(svg, kMarginLeft, kMarginLeft + kInnerWidth, top, bottom, {100, 20}, "workers, %");
  return bottom;
}

double own_seconds(std::span<const WorkerRow> rank) {
  const TimeSpan span = time_span(rank);
  return 1e-9 * static_cast<double>(span.end_ns - span.begin_ns);
}

double draw_chosen_rank(Svg& svg, const PassTimeline& p, std::span<const WorkerRow> rank,
                        std::string_view which, double top) {
  const std::vector<WorkerRow> rows = sampled_rows({rank.begin(), rank.end()}, kRowsOfChosen);
  svg.text(kMarginLeft, top + 10,
           cat("rank ", rank.front().rank, ", the ", which, ": ", short_time(own_seconds(rank)),
               " from its first task to its last", sampling_text(rows.size(), rank.size())),
           {11, kMutedColor});
  return draw_rows(svg, rows, p.span, top + 16, 11) + 8;
}

/// Draws all workers of many ranks together, and the fastest, the median and the slowest rank.
double draw_overview(Svg& svg, const PassTimeline& p, double top) {
  auto ranks = by_rank(p.workers);
  svg.text(kMarginLeft, top + 10,
           cat(name(p.pass), ", ", short_time(p.seconds()), ": all ", p.workers.size(),
               " workers of ", ranks.size(), " ranks, and three of these ranks"),
           kHeading);
  double y = draw_all_workers(svg, p, top + 20) + 14;
  std::ranges::stable_sort(ranks, {}, own_seconds);
  y = draw_chosen_rank(svg, p, ranks.front(), "fastest", y);
  y = draw_chosen_rank(svg, p, ranks[(ranks.size() - 1) / 2], "median", y);
  y = draw_chosen_rank(svg, p, ranks.back(), "slowest", y);
  draw_time_axis(svg, y - 4, y - 4, p.seconds());
  return y + 34;
}

std::vector<PassTimeline> passes_of(const PlotInput& input) {
  std::vector<PassTimeline> passes;
  for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
    std::vector<std::vector<TimelineEvent>> events(input.timeline.size());
    for (std::size_t r = 0; r < events.size(); ++r) {
      std::ranges::copy_if(input.timeline[r], std::back_inserter(events[r]),
                           [&](const TimelineEvent& e) { return e.pass == pass; });
    }
    PassTimeline p{pass, worker_rows(events), {}};
    p.span = time_span(p.workers);
    if (p.span.end_ns > p.span.begin_ns) passes.push_back(std::move(p));
  }
  return passes;
}

/// What workers were at, and what they were not at.
std::vector<Key> keys_of(const std::vector<PassTimeline>& passes) {
  std::array<bool, kActivities + 1> used{};
  used[kIdle] = true;
  for (const PassTimeline& p : passes) {
    for (const WorkerRow& row : p.workers) {
      for (const TimelineEvent& e : row.events) {
        const TaskTimes t = task_times(e);
        used[kWait] = used[kWait] || t.ready_ns > t.begin_ns;
        used[kLink] = used[kLink] || t.link_end_ns > t.link_begin_ns;
        used[static_cast<std::size_t>(e.stage)] = true;
      }
    }
  }
  std::vector<Key> keys;
  for (std::size_t kind = 0; kind <= kIdle; ++kind) {
    if (used[kind]) keys.push_back({activity_fill(kind), std::string(activity_name(kind))});
  }
  return keys;
}

std::string caption(const std::vector<PassTimeline>& passes) {
  std::string s =
      "a row a worker, numbered within its rank; half a pixel shows what took most of its time; "
      "work fills the row, waiting a part of it";
  const bool many = std::ranges::any_of(
      passes, [](const PassTimeline& p) { return by_rank(p.workers).size() > kRanksInFull; });
  if (many) s += "; stacked above the rows: what part of all workers is at each activity";
  return s;
}

}  // namespace

double draw_timeline_panel(Svg& svg, const PlotInput& input, double top) {
  const std::vector<PassTimeline> passes = passes_of(input);
  if (passes.empty()) {
    const double inner = draw_panel_title(svg, top, kTitle, "a row a worker");
    return draw_absence(svg, inner, "There is nothing to draw: no worker had a task.");
  }
  double y = draw_panel_title(svg, top, kTitle, caption(passes)) + 6;
  y = draw_keys(svg, kMarginLeft, y, keys_of(passes)) - 4;
  for (const PassTimeline& p : passes) {
    const bool few = by_rank(p.workers).size() <= kRanksInFull;
    y = (few ? draw_each_rank : draw_overview)(svg, p, y) + 12;
  }
  return y - 12;
}

}  // namespace uniep::trace
