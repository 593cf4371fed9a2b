#include "trace/activity.h"

#include <algorithm>
#include <numeric>

#include "trace/palette.h"

namespace uniep::trace {

Fill activity_fill(std::size_t activity) {
  if (activity == kWait) return kWaitColor;
  if (activity == kLink) return kLinkColor;
  if (activity == kIdle) return kIdleColor;
  return stage_fill(static_cast<Stage>(activity));
}

std::string_view activity_name(std::size_t activity) {
  if (activity == kWait) return "waiting for inputs";
  if (activity == kLink) return "waiting for the link";
  if (activity == kIdle) return "without a task";
  return name(static_cast<Stage>(activity));
}

Activity::Activity(const TimeSpan& span, std::size_t columns)
    : begin_ns_(static_cast<double>(span.begin_ns)),
      columns_per_ns_(static_cast<double>(columns) /
                      std::max(1.0, static_cast<double>(span.end_ns - span.begin_ns))),
      share_(columns) {}

void Activity::add(const TimelineEvent& e) {
  const TaskTimes t = task_times(e);
  const auto stage = static_cast<std::size_t>(e.stage);
  add(kWait, t.begin_ns, t.ready_ns);
  add(stage, t.ready_ns, t.link_begin_ns);
  add(kLink, t.link_begin_ns, t.link_end_ns);
  add(stage, t.link_end_ns, t.end_ns);
}

std::size_t Activity::dominant(std::size_t column) const {
  const auto& share = share_[column];
  if (std::reduce(share.begin(), share.end()) < 0.5) return kIdle;
  return static_cast<std::size_t>(std::ranges::max_element(share) - share.begin());
}

void Activity::add(std::size_t activity, std::int64_t begin_ns, std::int64_t end_ns) {
  const double a = (static_cast<double>(begin_ns) - begin_ns_) * columns_per_ns_;
  const double b = (static_cast<double>(end_ns) - begin_ns_) * columns_per_ns_;
  if (!(b > a)) return;
  const auto last = std::min(columns() - 1, static_cast<std::size_t>(b));
  for (auto c = static_cast<std::size_t>(a); c <= last; ++c) {
    const auto left = static_cast<double>(c);
    share_[c][activity] += std::max(0.0, std::min(b, left + 1) - std::max(a, left));
  }
}

}  // namespace uniep::trace
