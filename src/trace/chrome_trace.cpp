#include "trace/chrome_trace.h"

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <ostream>

#include "trace/timeline_rows.h"

namespace uniep::trace {
namespace {

constexpr const char* kWaitColor = "grey";
constexpr const char* kLinkColor = "yellow";

/// Microseconds with all their nanoseconds, so that nested slices keep nesting when they are read.
std::string microseconds(std::int64_t ns) {
  char text[32];
  std::snprintf(text, sizeof text, "%lld.%03lld", static_cast<long long>(ns / 1000),
                static_cast<long long>(ns % 1000));
  return text;
}

/// Writes the elements of "traceEvents", one a line.
class EventWriter {
 public:
  EventWriter(std::ostream& out, std::int64_t origin_ns, const Graph& graph)
      : out_(out), origin_ns_(origin_ns), graph_(graph) {}

  void row_names(std::span<const WorkerRow> rows) {
    int named_rank = -1;
    for (const WorkerRow& row : rows) {
      if (row.rank != named_rank) metadata(row.rank, 0, "process", "rank", row.rank);
      named_rank = row.rank;
      metadata(row.rank, row.worker, "thread", "worker", row.worker);
    }
  }

  void task(const WorkerRow& row, const TimelineEvent& e) {
    const TaskTimes t = task_times(e);
    if (t.ready_ns - t.begin_ns >= kShortestPauseNs) {
      slice(row, e, "wait", kWaitColor, t.begin_ns, t.ready_ns);
    }
    slice(row, e, name_of(e), color_of(e), t.ready_ns, t.end_ns);
    if (t.link_end_ns - t.link_begin_ns >= kShortestPauseNs) {
      slice(row, e, "link", kLinkColor, t.link_begin_ns, t.link_end_ns);
    }
  }

 private:
  const char* name_of(const TimelineEvent& e) const {
    const StageRow* row = graph_.find(e.stage);
    return row != nullptr ? row->name : name(e.stage);
  }
  const char* color_of(const TimelineEvent& e) const {
    const StageRow* row = graph_.find(e.stage);
    return (row != nullptr ? row->look : StageLook{}).trace_color;
  }

  void separate() {
    out_ << (first_ ? "\n" : ",\n");
    first_ = false;
  }

  void metadata(int pid, int tid, const char* of, const char* word, int number) {
    separate();
    out_ << R"({"ph":"M","pid":)" << pid << R"(,"tid":)" << tid << R"(,"name":")" << of
         << R"(_name","args":{"name":")" << word << ' ' << number << R"("}},)" << '\n';
    out_ << R"({"ph":"M","pid":)" << pid << R"(,"tid":)" << tid << R"(,"name":")" << of
         << R"(_sort_index","args":{"sort_index":)" << number << "}}";
  }

  void slice(const WorkerRow& row, const TimelineEvent& e, const char* what, const char* color,
             std::int64_t begin_ns, std::int64_t end_ns) {
    separate();
    out_ << R"({"ph":"X","pid":)" << row.rank << R"(,"tid":)" << row.worker << R"(,"name":")"
         << what << R"(","cat":")" << name_of(e) << R"(","cname":")" << color << R"(","ts":)"
         << microseconds(begin_ns - origin_ns_) << R"(,"dur":)" << microseconds(end_ns - begin_ns)
         << R"(,"args":{"tile":)" << e.tile << R"(,"expert":)" << e.expert << R"(,"launch":)"
         << e.launch << R"(,"pass":")" << name(e.pass) << R"("}})";
  }

  std::ostream& out_;
  std::int64_t origin_ns_;
  const Graph& graph_;
  bool first_ = true;
};

}  // namespace

void write_chrome_trace(std::ostream& out, std::span<const std::vector<TimelineEvent>> by_rank,
                        const TraceHeader& header, const Graph& graph) {
  const std::vector<WorkerRow> rows = worker_rows(by_rank);
  const nlohmann::ordered_json about = {{"version", header.version},
                                        {"machine", header.machine},
                                        {"command", header.command},
                                        {"schedule", header.schedule}};
  // A command line may hold bytes that are not UTF-8; they must not cost the user the file.
  constexpr auto kReplace = nlohmann::ordered_json::error_handler_t::replace;
  out << R"({"displayTimeUnit":"ms","otherData":)" << about.dump(-1, ' ', false, kReplace)
      << R"(,"traceEvents":[)";
  EventWriter writer(out, time_span(rows).begin_ns, graph);
  writer.row_names(rows);
  for (const WorkerRow& row : rows) {
    for (const TimelineEvent& e : row.events) writer.task(row, e);
  }
  out << "\n]}\n";
}

}  // namespace uniep::trace
