#include "trace/time_use.h"

#include <algorithm>
#include <limits>
#include <map>
#include <set>
#include <vector>

#include "graph/layer_graph.h"
#include "trace/timeline_rows.h"

namespace uniep::trace {
namespace {

double seconds(std::int64_t ns) { return 1e-9 * static_cast<double>(ns); }

/// Whether its tasks keep processors from others: all but those that move rows, which are waited
/// for beside these. Reduce, too: its sums are work that no schedule can hide.
bool computes(Stage stage) { return !fills_rows(stage); }

struct Interval {
  std::int64_t begin;
  std::int64_t end;
};

/// Moments of time, as intervals that are sorted and apart.
class Times {
 public:
  Times() = default;
  explicit Times(std::vector<Interval> any) {
    std::ranges::sort(any, {}, &Interval::begin);
    for (const Interval& i : any) {
      if (i.end <= i.begin) continue;
      if (!intervals_.empty() && i.begin <= intervals_.back().end) {
        intervals_.back().end = std::max(intervals_.back().end, i.end);
      } else {
        intervals_.push_back(i);
      }
    }
  }

  std::int64_t length() const {
    std::int64_t sum = 0;
    for (const Interval& i : intervals_) sum += i.end - i.begin;
    return sum;
  }

  Times without(const Times& other) const {
    std::vector<Interval> left;
    auto cut = other.intervals_.begin();
    for (Interval rest : intervals_) {
      while (cut != other.intervals_.end() && cut->end <= rest.begin) ++cut;
      for (auto c = cut; c != other.intervals_.end() && c->begin < rest.end; ++c) {
        left.push_back({rest.begin, c->begin});
        rest.begin = std::min(c->end, rest.end);
      }
      left.push_back(rest);
    }
    return Times(std::move(left));
  }

 private:
  std::vector<Interval> intervals_;
};

/// What workers are at, whether one or many.
struct Activity {
  std::vector<Interval> computing;
  std::vector<Interval> dispatching;
  std::vector<Interval> waiting;

  void add(const TimelineEvent& e) {
    const TaskTimes t = task_times(e);
    waiting.push_back({t.begin_ns, t.ready_ns});
    waiting.push_back({t.link_begin_ns, t.link_end_ns});
    if (computes(e.stage)) {
      computing.push_back({t.ready_ns, t.link_begin_ns});
    } else {
      dispatching.push_back({t.link_end_ns, t.end_ns});
    }
  }
};

/// The events of a pass, by the time at which they begin to be at work.
std::vector<TimelineEvent> events_of(std::span<const TimelineEvent> events, Pass pass) {
  std::vector<TimelineEvent> own;
  std::ranges::copy_if(events, std::back_inserter(own),
                       [&](const TimelineEvent& e) { return e.pass == pass; });
  std::ranges::stable_sort(own, {}, &TimelineEvent::ready_ns);
  return own;
}

double exposed_seconds(const std::vector<TimelineEvent>& events) {
  Activity all;
  for (const TimelineEvent& e : events) all.add(e);
  std::vector<Interval> communication = std::move(all.dispatching);
  communication.insert(communication.end(), all.waiting.begin(), all.waiting.end());
  return seconds(Times(communication).without(Times(all.computing)).length());
}

/// When a launch began, and when it ended on each processor that has tasks in it.
struct LaunchEnds {
  std::int64_t begin = std::numeric_limits<std::int64_t>::max();
  std::int64_t end = 0;
  std::map<int, std::int64_t> by_processor{};
};

double tail_seconds(const std::vector<TimelineEvent>& events) {
  std::map<int, LaunchEnds> launches;
  std::set<int> computing;
  for (const TimelineEvent& e : events) {
    LaunchEnds& launch = launches[e.launch];
    launch.begin = std::min(launch.begin, e.begin_ns);
    launch.end = std::max(launch.end, e.end_ns);
    std::int64_t& own_end = launch.by_processor[e.processor];
    own_end = std::max(own_end, e.end_ns);
    if (computes(e.stage)) computing.insert(e.processor);
  }
  std::int64_t tails = 0;
  for (const auto& [number, launch] : launches) {
    std::int64_t first_end = launch.end;
    for (const int processor : computing) {
      const auto it = launch.by_processor.find(processor);
      first_end = std::min(first_end, it == launch.by_processor.end() ? launch.begin : it->second);
    }
    tails += launch.end - first_end;
  }
  return seconds(tails);
}

double clock_hz(const std::vector<TimelineEvent>& events) {
  std::int64_t cycles = 0, ns = 0;
  for (const TimelineEvent& e : events) {
    if (e.cycles == 0) continue;
    cycles += e.cycles;
    ns += e.end_ns - e.ready_ns;
  }
  return ns > 0 ? static_cast<double>(cycles) / seconds(ns) : 0;
}

/// Adds what one processor did; its events are sorted as `events_of` does.
void add_processor(TimeUse& use, const std::vector<TimelineEvent>& events) {
  Activity activity;
  std::int64_t free = 0;
  for (const TimelineEvent& e : events) {
    activity.add(e);
    if (!computes(e.stage)) continue;
    // The consumers of a CTA may be a task apart: no moment counts twice.
    const TaskTimes t = task_times(e);
    const std::int64_t begin = std::max(t.ready_ns, free);
    free = std::max(free, t.link_begin_ns);
    use.stage_s[static_cast<std::size_t>(e.stage)] +=
        seconds(std::max<std::int64_t>(0, t.link_begin_ns - begin));
  }
  const Times computing(activity.computing);
  const Times dispatching = Times(activity.dispatching).without(computing);
  const Times waiting = Times(activity.waiting).without(computing).without(dispatching);
  use.stage_s[static_cast<std::size_t>(Stage::kDispatch)] += seconds(dispatching.length());
  use.waiting_s += seconds(waiting.length());
  use.idle_s += use.span_s - seconds(computing.length() + dispatching.length() + waiting.length());
}

}  // namespace

TimeUse time_use(std::span<const TimelineEvent> all, Pass pass) {
  const std::vector<TimelineEvent> events = events_of(all, pass);
  TimeUse use;
  if (events.empty()) return use;
  const auto begin = std::ranges::min(events, {}, &TimelineEvent::begin_ns).begin_ns;
  const auto end = std::ranges::max(events, {}, &TimelineEvent::end_ns).end_ns;
  std::map<int, std::vector<TimelineEvent>> processors;
  for (const TimelineEvent& e : events) processors[e.processor].push_back(e);
  use.processors = static_cast<int>(processors.size());
  use.span_s = seconds(end - begin);
  use.exposed_s = exposed_seconds(events);
  use.tail_s = tail_seconds(events);
  use.clock_hz = clock_hz(events);
  for (const auto& [processor, own] : processors) add_processor(use, own);
  return use;
}

}  // namespace uniep::trace
