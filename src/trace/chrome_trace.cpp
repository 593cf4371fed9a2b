#include "trace/chrome_trace.h"

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <ostream>

#include "trace/timeline_rows.h"

namespace uniep::trace {
namespace {

/// A name of Chrome's reserved palette: a stage keeps its colour from file to file.
const char* color_name(Stage stage) {
  switch (stage) {
    case Stage::kPlan:
    case Stage::kEnter:
      return "generic_work";
    case Stage::kDispatch:
      return "rail_animation";
    case Stage::kFc1:
      return "thread_state_runnable";
    case Stage::kFc2:
      return "rail_idle";
    case Stage::kDfc2:
      return "thread_state_running";
    case Stage::kDfc1:
      return "good";
    case Stage::kWgrad2:
      return "rail_response";
    case Stage::kWgrad1:
      return "startup";
    case Stage::kReduce:
      return "bad";
  }
  return "generic_work";
}
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
  EventWriter(std::ostream& out, std::int64_t origin_ns) : out_(out), origin_ns_(origin_ns) {}

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
    slice(row, e, name(e.stage), color_name(e.stage), t.ready_ns, t.end_ns);
    if (t.link_end_ns - t.link_begin_ns >= kShortestPauseNs) {
      slice(row, e, "link", kLinkColor, t.link_begin_ns, t.link_end_ns);
    }
  }

 private:
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
         << what << R"(","cat":")" << name(e.stage) << R"(","cname":")" << color << R"(","ts":)"
         << microseconds(begin_ns - origin_ns_) << R"(,"dur":)" << microseconds(end_ns - begin_ns)
         << R"(,"args":{"tile":)" << e.tile << R"(,"expert":)" << e.expert << R"(,"launch":)"
         << e.launch << R"(,"pass":")" << name(e.pass) << R"("}})";
  }

  std::ostream& out_;
  std::int64_t origin_ns_;
  bool first_ = true;
};

}  // namespace

void write_chrome_trace(std::ostream& out, std::span<const std::vector<TimelineEvent>> by_rank,
                        const TraceHeader& header) {
  const std::vector<WorkerRow> rows = worker_rows(by_rank);
  const nlohmann::ordered_json about = {{"version", header.version},
                                        {"machine", header.machine},
                                        {"command", header.command},
                                        {"schedule", header.schedule}};
  // A command line may hold bytes that are not UTF-8; they must not cost the user the file.
  constexpr auto kReplace = nlohmann::ordered_json::error_handler_t::replace;
  out << R"({"displayTimeUnit":"ms","otherData":)" << about.dump(-1, ' ', false, kReplace)
      << R"(,"traceEvents":[)";
  EventWriter writer(out, time_span(rows).begin_ns);
  writer.row_names(rows);
  for (const WorkerRow& row : rows) {
    for (const TimelineEvent& e : row.events) writer.task(row, e);
  }
  out << "\n]}\n";
}

}  // namespace uniep::trace
