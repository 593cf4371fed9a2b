#include "trace/timeline_rows.h"

#include <algorithm>
#include <map>
#include <utility>

#include "graph/layer_graph.h"

namespace uniep::trace {

std::vector<WorkerRow> worker_rows(std::span<const std::vector<TimelineEvent>> by_rank) {
  std::vector<WorkerRow> rows;
  for (std::size_t rank = 0; rank < by_rank.size(); ++rank) {
    std::map<int, std::vector<TimelineEvent>> by_worker;
    for (const TimelineEvent& e : by_rank[rank]) by_worker[e.worker].push_back(e);
    for (auto& [worker, events] : by_worker) {
      std::ranges::stable_sort(events, {}, &TimelineEvent::begin_ns);
      rows.push_back({static_cast<int>(rank), worker, std::move(events)});
    }
  }
  return rows;
}

std::vector<WorkerRow> sampled_rows(const std::vector<WorkerRow>& rows, std::size_t most) {
  std::vector<WorkerRow> sample;
  for (std::size_t begin = 0; begin < rows.size();) {
    std::size_t end = begin;
    while (end < rows.size() && rows[end].rank == rows[begin].rank) ++end;
    const std::size_t kept = std::min(most, end - begin);
    for (std::size_t i = 0; i < kept; ++i) {
      sample.push_back(rows[begin + i * (end - begin) / kept]);
    }
    begin = end;
  }
  return sample;
}

TimeSpan time_span(std::span<const WorkerRow> rows) {
  TimeSpan span;
  bool first = true;
  for (const WorkerRow& row : rows) {
    for (const TimelineEvent& e : row.events) {
      span.begin_ns = first ? e.begin_ns : std::min(span.begin_ns, e.begin_ns);
      span.end_ns = first ? e.end_ns : std::max(span.end_ns, e.end_ns);
      first = false;
    }
  }
  return span;
}

TaskTimes task_times(const TimelineEvent& e) {
  TaskTimes t;
  t.begin_ns = e.begin_ns;
  t.end_ns = std::max(e.begin_ns, e.end_ns);
  t.ready_ns = std::clamp(e.ready_ns, t.begin_ns, t.end_ns);
  const std::int64_t link = std::clamp<std::int64_t>(e.link_ns, 0, t.end_ns - t.ready_ns);
  t.link_begin_ns = pulls(e.stage) ? t.ready_ns : t.end_ns - link;
  t.link_end_ns = t.link_begin_ns + link;
  return t;
}

}  // namespace uniep::trace
