#include "run/stage_figures.h"

#include <numeric>

#include "base/check.h"
#include "common/table.h"
#include "trace/time_use.h"

namespace uniep::tool {

std::vector<StageFigures> stage_figures(const PassRecord& record) {
  std::vector<StageFigures> figures;
  for (int i = 0; i < kNumStages; ++i) {
    const auto stage = static_cast<Stage>(i);
    const auto of = [&](const auto& figure) { return over_ranks(record, stage, figure); };
    const OverRanks tasks = of([](const StageStats& s) { return s.tasks; });
    StageFigures f{.stage = stage,
                   .tasks = static_cast<std::int64_t>(median(tasks.sum)),
                   .busy_s = of([](const StageStats& s) { return s.busy_s; }),
                   .wait_s = of([](const StageStats& s) { return s.wait_s; }),
                   .link_s = of([](const StageStats& s) { return s.link_s; })};
    if (f.tasks > 0 || median(f.wait_s.sum) > 0) figures.push_back(std::move(f));
  }
  return figures;
}

WireFigures wire_figures(const PassRecord& record) {
  WireFigures wire;
  if (record.stats.empty()) return wire;
  for (const PassStats& stats : record.stats.back()) {
    wire.pulled_no_dedup += stats.pulled_bytes_no_dedup;
    wire.pulled += stats.pulled_bytes;
    wire.pushed += stats.pushed_bytes;
  }
  return wire;
}

std::optional<TimeFigures> time_figures(const StepReport& report, Pass pass) {
  TimeFigures figures;
  double total_s = 0;
  for (const std::vector<TimelineEvent>& events : report.timeline) {
    const trace::TimeUse use = trace::time_use(events, pass);
    figures.exposed_s = std::max(figures.exposed_s, use.exposed_s);
    figures.tail_s = std::max(figures.tail_s, use.tail_s);
    if (use.clock_hz > 0 && (figures.clock_hz == 0 || use.clock_hz < figures.clock_hz)) {
      figures.clock_hz = use.clock_hz;
    }
    for (std::size_t i = 0; i < use.stage_s.size(); ++i) figures.stage[i] += use.stage_s[i];
    figures.waiting += use.waiting_s;
    figures.idle += use.idle_s;
    total_s += use.total_s();
  }
  if (total_s == 0) return std::nullopt;
  for (double& share : figures.stage) share /= total_s;
  figures.waiting /= total_s;
  figures.idle /= total_s;
  return figures;
}

LoadFigures load_figures(const StepReport& report) {
  LoadFigures load;
  for (const Traffic& t : report.traffic) {
    load.rows += t.rows;
    load.remote_rows += t.remote_rows;
  }
  const std::vector<double> rows(report.rows_per_expert.begin(), report.rows_per_expert.end());
  if (rows.empty()) return load;
  load.min = std::ranges::min(report.rows_per_expert);
  load.max = std::ranges::max(report.rows_per_expert);
  load.median = median(rows);
  load.mean = static_cast<double>(load.rows) / static_cast<double>(rows.size());
  return load;
}

std::string load_text(const std::vector<std::int64_t>& rows_per_expert) {
  const std::vector<double> rows(rows_per_expert.begin(), rows_per_expert.end());
  if (rows.empty()) return "no experts";
  const auto [least, most] = std::ranges::minmax(rows);
  const double sum = std::accumulate(rows.begin(), rows.end(), 0.0);
  const double ratio = sum > 0 ? most * static_cast<double>(rows.size()) / sum : 0;
  return cat("rows per expert: min ", formatted("%.0f", least), ", median ",
             formatted("%.10g", median(rows)), ", max ", formatted("%.0f", most), ", max / mean ",
             formatted("%.2f", ratio));
}

}  // namespace uniep::tool
