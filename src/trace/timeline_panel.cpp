#include <array>
#include <vector>

#include "base/check.h"
#include "trace/panels.h"
#include "trace/timeline_rows.h"

namespace uniep::trace {
namespace {

// What a worker does at a moment: a stage, or one of these.
constexpr std::size_t kWait = kNumStages;
constexpr std::size_t kLink = kNumStages + 1;
constexpr std::size_t kKinds = kNumStages + 2;
constexpr std::size_t kIdle = kKinds;

// Tasks are far more and far shorter than pixels, so a row is drawn as columns of half a pixel,
// each in the colour of what took most of its time.
constexpr double kColumnWidth = 0.5;
constexpr auto kColumns = static_cast<std::size_t>(kInnerWidth / kColumnWidth);

/// Rows drawn of a rank.
constexpr std::size_t kMostRows = 48;

std::string_view kind_color(std::size_t kind) {
  if (kind == kWait) return kWaitColor;
  if (kind == kLink) return kLinkColor;
  return stage_color(static_cast<Stage>(kind));
}

/// Which kind each column of a row shows.
class RowRaster {
 public:
  explicit RowRaster(const TimeSpan& span)
      : begin_ns_(static_cast<double>(span.begin_ns)),
        columns_per_ns_(static_cast<double>(kColumns) /
                        std::max(1.0, static_cast<double>(span.end_ns - span.begin_ns))),
        share_(kColumns) {}

  void add(const TimelineEvent& e) {
    const TaskTimes t = task_times(e);
    const auto stage = static_cast<std::size_t>(e.stage);
    add(kWait, t.begin_ns, t.ready_ns);
    add(stage, t.ready_ns, t.link_begin_ns);
    add(kLink, t.link_begin_ns, t.link_end_ns);
    add(stage, t.link_end_ns, t.end_ns);
  }

  std::size_t kind(std::size_t column) const {
    const auto& share = share_[column];
    double busy = 0;
    for (const double s : share) busy += s;
    if (busy < 0.5) return kIdle;
    return static_cast<std::size_t>(std::ranges::max_element(share) - share.begin());
  }

 private:
  void add(std::size_t kind, std::int64_t begin_ns, std::int64_t end_ns) {
    const double a = (static_cast<double>(begin_ns) - begin_ns_) * columns_per_ns_;
    const double b = (static_cast<double>(end_ns) - begin_ns_) * columns_per_ns_;
    if (!(b > a)) return;
    const auto last = std::min(kColumns - 1, static_cast<std::size_t>(b));
    for (auto c = static_cast<std::size_t>(a); c <= last; ++c) {
      const auto left = static_cast<double>(c);
      share_[c][kind] += std::max(0.0, std::min(b, left + 1) - std::max(a, left));
    }
  }

  double begin_ns_;
  double columns_per_ns_;
  std::vector<std::array<double, kKinds>> share_;
};

using UsedKinds = std::array<bool, kKinds>;

void draw_row(Svg& svg, const WorkerRow& row, const TimeSpan& span, double y, double height,
              UsedKinds& used) {
  RowRaster raster(span);
  for (const TimelineEvent& e : row.events) raster.add(e);
  std::array<std::vector<Svg::Bar>, kKinds> bars;
  for (std::size_t c = 0; c < kColumns;) {
    const std::size_t kind = raster.kind(c);
    const std::size_t first = c;
    while (c < kColumns && raster.kind(c) == kind) ++c;
    if (kind == kIdle) continue;
    bars[kind].push_back({kMarginLeft + kColumnWidth * static_cast<double>(first),
                          kColumnWidth * static_cast<double>(c - first)});
  }
  svg.rect(kMarginLeft, y, kInnerWidth, height, kIdleColor);
  for (std::size_t kind = 0; kind < kKinds; ++kind) {
    used[kind] = used[kind] || !bars[kind].empty();
    svg.bars(bars[kind], y, height, kind_color(kind));
  }
}

double row_height(std::size_t rows) { return rows <= 8 ? 16 : rows <= 24 ? 11 : 7; }

/// Rows of one pass; returns where they end.
double draw_rows(Svg& svg, const std::vector<WorkerRow>& rows, const TimeSpan& span, double top,
                 UsedKinds& used) {
  const double height = row_height(rows.size());
  double y = top;
  for (std::size_t i = 0; i < rows.size();) {
    const int rank = rows[i].rank;
    const double rank_top = y;
    for (; i < rows.size() && rows[i].rank == rank; ++i) {
      draw_row(svg, rows[i], span, y, height, used);
      if (height >= 11) {
        svg.text(kMarginLeft - 6, y + height / 2 + 3.5, cat(rows[i].worker),
                 {9, kAxisColor, Anchor::kEnd});
      }
      y += height + 1;
    }
    // A name needs more room than the thinnest rows of one worker have.
    if (y - rank_top >= 11 || rank % 2 == 0) {
      svg.text(kMarginLeft - (height >= 11 ? 20 : 8), (rank_top + y) / 2 + 3.5, cat("rank ", rank),
               {11, kMutedColor, Anchor::kEnd});
    }
    y += 3;
  }
  return y;
}

void draw_time_axis(Svg& svg, double top, double bottom, double seconds) {
  const TimeUnit unit = time_unit(seconds);
  const double end = seconds * unit.per_second;
  const double step = tick_step(end, 14);
  for (int i = 0; i * step <= end * (1 + 1e-9); ++i) {
    const double x = kMarginLeft + kInnerWidth * (i * step / end);
    svg.line(x, top, x, bottom + 4, kAxisColor, 0.5);
    const bool named = i > 0 && (i + 1) * step > end;
    svg.text(x, bottom + 16, cat(short_number(i * step), named ? cat(" ", unit.name) : ""),
             {11, kMutedColor, x > kPlotWidth - 50 ? Anchor::kEnd : Anchor::kMiddle});
  }
}

std::vector<std::vector<TimelineEvent>> events_of(const PlotInput& input, Pass pass) {
  std::vector<std::vector<TimelineEvent>> by_rank(input.timeline.size());
  for (std::size_t r = 0; r < by_rank.size(); ++r) {
    for (const TimelineEvent& e : input.timeline[r]) {
      if (e.pass == pass) by_rank[r].push_back(e);
    }
  }
  return by_rank;
}

double draw_pass(Svg& svg, const PlotInput& input, Pass pass, double top, UsedKinds& used) {
  const auto by_rank = events_of(input, pass);
  const std::vector<WorkerRow> all = worker_rows(by_rank);
  const TimeSpan span = time_span(all);
  const std::vector<WorkerRow> rows = sampled_rows(all, kMostRows);
  if (rows.empty() || span.end_ns <= span.begin_ns) return top;
  const double seconds = 1e-9 * static_cast<double>(span.end_ns - span.begin_ns);
  const std::string sampling =
      rows.size() < all.size() ? cat("; ", rows.size(), " of ", all.size(), " workers") : "";
  svg.text(kMarginLeft, top + 10, cat(name(pass), ", ", short_time(seconds), sampling),
           {12, kMutedColor, Anchor::kStart, true});
  const double bottom = draw_rows(svg, rows, span, top + 18, used);
  draw_time_axis(svg, top + 18, bottom, seconds);
  return bottom + 34;
}

void draw_legend(Svg& svg, const UsedKinds& used, double baseline) {
  double x = kMarginLeft;
  for (std::size_t kind = 0; kind < kNumStages; ++kind) {
    if (!used[kind]) continue;
    x = draw_key(svg, x, baseline, kind_color(kind), name(static_cast<Stage>(kind)));
  }
  if (used[kLink]) x = draw_key(svg, x, baseline, kLinkColor, "wait for link");
  if (used[kWait]) x = draw_key(svg, x, baseline, kWaitColor, "wait for inputs");
  draw_key(svg, x, baseline, kAxisColor, "idle");
  svg.rect(x + 0.75, baseline - 9.25, 10.5, 10.5, kIdleColor);
}

}  // namespace

double draw_timeline_panel(Svg& svg, const PlotInput& input, double top) {
  const bool any = std::ranges::any_of(input.timeline, [](const auto& e) { return !e.empty(); });
  if (!any) return top;
  double y = draw_panel_title(
      svg, top, "Timeline",
      "a row a worker, numbered within its rank; half a pixel shows what took most of its time");
  const double legend = y + 10;
  y += 26;
  UsedKinds used{};
  for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
    y = draw_pass(svg, input, pass, y, used);
  }
  draw_legend(svg, used, legend);
  return y;
}

}  // namespace uniep::trace
