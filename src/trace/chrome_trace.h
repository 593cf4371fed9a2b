#pragma once

#include <iosfwd>
#include <span>
#include <string>
#include <vector>

#include "graph/layer_graph.h"
#include "uniep/timeline.h"

namespace uniep::trace {

/// What a trace file says about the run that it shows. Strings are written as they are.
struct TraceHeader {
  std::string version;
  std::string machine;
  std::string command;
  std::string schedule;
};

/// Waits and link times below this are left out of the file: they would be most of its slices and
/// none of its picture.
inline constexpr std::int64_t kShortestPauseNs = 1000;

/// Writes a timeline in Chrome's trace event format, which ui.perfetto.dev and chrome://tracing
/// open: element r of `by_rank` has the events of rank r (in any order). A process a rank, a thread
/// a worker, a slice a tile task from the moment its inputs were ready; before it, where the worker
/// had to wait for them, a "wait" slice; inside it, a "link" slice for the time that it spent
/// waiting for the link (see task_times). Times are microseconds since the earliest event of any
/// rank. `graph` names the stages.
void write_chrome_trace(std::ostream& out, std::span<const std::vector<TimelineEvent>> by_rank,
                        const TraceHeader& header, const Graph& graph = kLayerGraph);

}  // namespace uniep::trace
