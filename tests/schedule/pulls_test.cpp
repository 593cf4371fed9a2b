// A pass whose ranks pull x again ends on no rank before all of its own x has been pulled: the next
// pass overwrites what peers pull from.
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <tuple>
#include <vector>

#include "base/check.h"
#include "plan/plan_data.h"
#include "schedule/dependencies.h"
#include "schedule/launches.h"
#include "schedule/pass_order.h"
#include "schedule/queue.h"
#include "schedule/queue_table.h"
#include "uniep/routing_plan.h"

namespace uniep {
namespace {

constexpr int kRanks = 2;

Problem problem_of(bool recompute_h, std::int64_t backward_rows) {
  Problem p{.hidden = 64, .intermediate = 64, .num_experts = 4, .topk = 2, .max_tokens = 256};
  p.save = Save::kNone;
  p.recompute_h = recompute_h;
  p.backward_rows = backward_rows;
  return p;
}

std::vector<std::int32_t> ids_of(const Problem& p) {
  std::vector<std::int32_t> ids;
  for (int t = 0; t < kRanks * p.max_tokens; ++t) {
    ids.push_back(t % 4);
    ids.push_back((t + 1 + t / 4 % 2) % 4);
  }
  return ids;
}

/// The ranks of a pass: tasks of a launch in any order that their waits allow, without their work.
class Ranks {
 public:
  Ranks(const Problem& problem, const Schedule& schedule, PassPart part) {
    const std::vector<std::int64_t> tokens(kRanks, problem.max_tokens);
    for (int r = 0; r < kRanks; ++r) {
      plans_.push_back(RoutingPlan::build(problem, r, tokens, ids_of(problem)));
      orders_.push_back(
          std::make_unique<PassOrder>(plans_.back().data(), Pass::kBackward, schedule, part));
    }
    for (int r = 0; r < kRanks; ++r) {
      for (int peer = 0; peer < kRanks; ++peer) {
        signal(source_signal(view(r), CounterKind::kPublished, peer));
      }
      begin(r, 0);
    }
  }

  /// As far as they come, where rank 1 does nothing of one stage.
  void run_without(Stage withheld) {
    for (bool moved = true; moved;) {
      moved = false;
      for (int r = 0; r < kRanks; ++r) moved |= step(r, withheld);
    }
  }

  bool has_ended(int rank) const {
    return launch_[rank] == num_launches(view(rank)) && left_[rank].empty();
  }

 private:
  const PassView& view(int rank) const { return orders_[static_cast<std::size_t>(rank)]->view(); }

  void begin(int rank, int launch) {
    launch_[rank] = launch;
    const PassView& v = view(rank);
    if (launch == num_launches(v)) return;
    const Launch tracks = launch_at(v, launch);
    for (const TrackList* list : {&tracks.comm, &tracks.main}) {
      const QueueTable queue(v, *list);
      for_each_task(v, queue.view(), [&](const Task& task) { left_[rank].push_back(task); });
    }
    if (left_[rank].empty()) begin(rank, launch + 1);
  }

  bool step(int rank, Stage withheld) {
    if (left_[rank].empty()) return false;
    const std::size_t before = left_[rank].size();
    std::erase_if(left_[rank], [&](const Task& task) {
      if ((rank == 1 && task.stage == withheld) || !may_run(rank, task)) return false;
      for_each_signal(view(rank), task, [&](const Signal& s) { signal(s); });
      return true;
    });
    const bool moved = left_[rank].size() != before;
    if (left_[rank].empty()) begin(rank, launch_[rank] + 1);
    return moved;
  }

  bool may_run(int rank, const Task& task) {
    bool may = true;
    for_each_wait(view(rank), task, [&](const Wait& w) {
      const std::uint32_t count = counters_[{rank, static_cast<int>(w.kind), w.index}];
      may &= static_cast<std::int32_t>(count - w.expected) >= 0;
    });
    return may;
  }

  void signal(const Signal& s) {
    counters_[{s.rank, static_cast<int>(s.kind), s.index}] += s.amount;
  }

  std::vector<RoutingPlan> plans_;
  std::vector<std::unique_ptr<PassOrder>> orders_;
  std::map<std::tuple<int, int, std::int64_t>, std::uint32_t> counters_;
  std::vector<Task> left_[kRanks];  // of the launch at hand
  int launch_[kRanks] = {};
};

TEST(PullsOfX, AreDoneWhereTheRankThatHasItEndsItsPass) {
  const std::pair<LaunchGrouping, int> launches[] = {{LaunchGrouping::kSeparate, 1},
                                                     {LaunchGrouping::kPipelined, 2},
                                                     {LaunchGrouping::kPaired, 1},
                                                     {LaunchGrouping::kSingle, 1},
                                                     {LaunchGrouping::kWaves, 2}};
  const WgradPlacement placements[] = {WgradPlacement::kSeparate, WgradPlacement::kAfter,
                                       WgradPlacement::kInterleaved};
  for (const bool recompute_h : {false, true}) {
    for (const std::int64_t backward_rows : {0, 384}) {
      for (const auto& [launch, waves] : launches) {
        for (const WgradPlacement wgrad : placements) {
          for (const PassPart part : {PassPart::kWhole, PassPart::kData}) {
            if (backward_rows > 0 && part == PassPart::kData) continue;  // keeps all rows
            const Problem problem = problem_of(recompute_h, backward_rows);
            Schedule schedule = default_schedule(Backend::kCuda);
            schedule.launch = launch;
            schedule.waves = waves;
            schedule.wgrad = wgrad;
            const std::string where = cat(to_string(schedule), ", recompute_h ", recompute_h,
                                          ", backward_rows ", backward_rows);
            Ranks all(problem, schedule, part);
            all.run_without(Stage::kPlan);
            EXPECT_TRUE(all.has_ended(0) && all.has_ended(1)) << where;
            Ranks slow(problem, schedule, part);
            slow.run_without(Stage::kRedispatch);
            EXPECT_FALSE(slow.has_ended(0)) << where;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace uniep
