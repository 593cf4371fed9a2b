#pragma once

#include <vector>

#include "uniep/timeline.h"

namespace uniep::trace {

/// A timeline with one worker row a (rank, worker) and `tasks` tasks each, every one of them
/// `busy_ns` long after a wait of `wait_ns`, the last `link_ns` of it for the link. Rank r starts
/// r microseconds late.
struct MadeUpRun {
  int ranks = 1;
  int workers = 1;
  int tasks = 4;
  std::int64_t busy_ns = 20'000;
  std::int64_t wait_ns = 5'000;
  std::int64_t link_ns = 2'000;
  Pass pass = Pass::kForward;
  std::int64_t start_ns = 7'000'000'000;

  std::vector<std::vector<TimelineEvent>> timeline() const {
    std::vector<std::vector<TimelineEvent>> by_rank(static_cast<std::size_t>(ranks));
    for (int r = 0; r < ranks; ++r) {
      for (int w = 0; w < workers; ++w) add_worker(by_rank[static_cast<std::size_t>(r)], r, w);
    }
    return by_rank;
  }

  std::vector<PassStats> stats() const {
    std::vector<PassStats> by_rank(static_cast<std::size_t>(ranks));
    const auto events = timeline();
    for (std::size_t r = 0; r < by_rank.size(); ++r) {
      by_rank[r].pass = pass;
      for (const TimelineEvent& e : events[r]) {
        StageStats& s = by_rank[r][e.stage];
        ++s.tasks;
        s.busy_s += 1e-9 * static_cast<double>(e.end_ns - e.ready_ns - e.link_ns);
        s.link_s += 1e-9 * static_cast<double>(e.link_ns);
        s.wait_s += 1e-9 * static_cast<double>(e.ready_ns - e.begin_ns);
      }
    }
    return by_rank;
  }

 private:
  void add_worker(std::vector<TimelineEvent>& events, int rank, int worker) const {
    constexpr Stage kForward[] = {Stage::kDispatch, Stage::kFc1, Stage::kFc2, Stage::kReduce};
    constexpr Stage kBackward[] = {Stage::kDispatch, Stage::kDfc2, Stage::kWgrad2, Stage::kReduce};
    // A variable of its own: GCC 12 under UBSan loses the index of `(c ? a : b)[i]`.
    const auto& stages = pass == Pass::kForward ? kForward : kBackward;
    std::int64_t now = start_ns + 1000 * rank;
    for (int i = 0; i < tasks; ++i) {
      TimelineEvent e;
      e.pass = pass;
      e.stage = stages[i % 4];
      e.worker = worker;
      e.processor = worker;
      e.launch = 1;
      e.expert = i;
      e.tile = 10 + i;
      e.begin_ns = now;
      e.ready_ns = e.begin_ns + wait_ns;
      e.link_ns = link_ns;
      e.end_ns = e.ready_ns + busy_ns;
      now = e.end_ns;
      events.push_back(e);
    }
  }
};

}  // namespace uniep::trace
