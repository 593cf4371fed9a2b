// The queues of a pass: every task once, found by binary search as by plain enumeration.
#include "schedule/queue.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <optional>
#include <set>
#include <tuple>

#include "schedule/queue_table.h"
#include "schedule/random_pass.h"
#include "support/cases.h"

namespace uniep::testing {
namespace {

using Key = std::tuple<Stage, int, std::int64_t, std::int64_t, std::int64_t>;
Key key(const Task& t) { return {t.stage, t.expert, t.m, t.n, t.tile}; }

/// All tasks of a rank's pass, launch after launch.
std::vector<Task> all_tasks(const PassView& v) {
  std::vector<Task> tasks;
  for (int i = 0; i < num_launches(v); ++i) {
    const Launch launch = launch_at(v, i);
    for (const TrackList* queue : {&launch.comm, &launch.main}) {
      const std::vector<Task> more = tasks_of(v, *queue);
      tasks.insert(tasks.end(), more.begin(), more.end());
    }
  }
  return tasks;
}

void expect_found(const PassView& v, const TrackList& tracks) {
  const QueueTable queue(v, tracks);
  const std::vector<Task> want = tasks_of(v, tracks);
  std::vector<Task> got;
  for_each_task(v, queue.view(), [&](const Task& task) { got.push_back(task); });
  ASSERT_EQ(got.size(), want.size());
  for (std::size_t i = 0; i < want.size(); ++i) {
    ASSERT_EQ(key(got[i]), key(want[i])) << "task " << i;
  }
}

TEST(Queue, BinarySearchFindsWhatEnumerationLists) {
  for_each_rank_of_random_passes(1000, 60, [](const RoutingPlan&, const PassView& v) {
    for (int i = 0; i < num_launches(v); ++i) {
      const Launch launch = launch_at(v, i);
      expect_found(v, launch.comm);
      expect_found(v, launch.main);
    }
  });
}

TEST(Signals, RowsOfOneSourceAndBlockAreOne) {
  for_each_rank_of_random_passes(300, 60, [](const RoutingPlan&, const PassView& v) {
    for (int i = 0; i < num_launches(v); ++i) {
      for (const Task& task : tasks_of(v, launch_at(v, i).main)) {
        if (task.stage != Stage::kFc2 && task.stage != Stage::kDfc1) continue;
        const std::int64_t cols = column_tile(stage_grid(v, task.stage), task.n).count;
        std::int64_t elements = 0;
        std::optional<Signal> before;
        for_each_signal(v, task, [&](const Signal& s) {
          if (s.kind != CounterKind::kArrived) return;
          EXPECT_FALSE(before && before->rank == s.rank && before->index == s.index);
          EXPECT_EQ(s.amount % cols, 0) << "whole rows";
          elements += s.amount;
          before = s;
        });
        EXPECT_EQ(elements, v.tiles[task.m].rows * cols);
      }
    }
  });
}

// Where blocks are mixed, the tasks up to any one of them hold of the first and of the others what
// is due, to within a run.
TEST(Queue, MixedBlocksAreSpreadEvenly) {
  Rng rng(1);
  const auto number = [&](std::uint32_t least, std::uint32_t most) {
    return least + static_cast<std::uint32_t>(rng() % (most - least + 1));
  };
  const int count = cases(1000);
  for (int i = 0; i < count; ++i) {
    const std::uint32_t run = number(1, 12), own = number(0, 60), others = number(0, 60);
    SCOPED_TRACE(cat(own, " in runs of ", run, ", and ", others));
    const std::uint32_t all = own + others;
    const Deal deal{.own = own, .all = all, .run = run};
    std::uint32_t taken = 0, taken_of_others = 0;
    for (std::uint32_t at = 0; at < all; ++at) {
      const std::uint32_t task = deal.task_at(at);
      ASSERT_EQ(task < own ? task : task - own, (task < own ? taken : taken_of_others)++);
      const double due = static_cast<double>((at + 1) * own) / all;
      ASSERT_LE(taken, due + 1e-9);
      ASSERT_GT(taken, due - run - 1);
    }
    ASSERT_EQ(taken, own);
  }
}

/// The order in which tiles of fc1 and of fc2 are taken, by name.
std::string order_of(std::uint32_t fc1, std::uint32_t fc2, std::uint32_t run) {
  const Deal deal{.own = fc1, .all = fc1 + fc2, .run = run};
  std::string order;
  for (std::uint32_t at = 0; at < deal.all; ++at) {
    const std::uint32_t task = deal.task_at(at);
    order += at == 0 ? "" : " ";
    order += task < fc1 ? cat("a", task) : cat("b", task - fc1);
  }
  return order;
}

// The example of docs/schedule.md.
TEST(Queue, ThreeTilesOfFc1AmongFiveOfFc2) {
  EXPECT_EQ(order_of(3, 5, 1), "b0 b1 a0 b2 b3 a1 b4 a2");
  EXPECT_EQ(order_of(3, 5, 2), "b0 b1 b2 b3 a0 a1 b4 a2");
  EXPECT_EQ(order_of(3, 5, 3), "b0 b1 b2 b3 b4 a0 a1 a2");
  EXPECT_EQ(order_of(5, 3, 1), "b0 a0 b1 a1 a2 b2 a3 a4");
}

TEST(Queue, OnlyWhereBothProductsShareALaunchIsAnythingMixed) {
  const int count = cases(500);
  int mixed = 0;
  for (int seed = 1; seed <= count || (mixed == 0 && seed <= 500); ++seed) {
    const RandomPass p = random_pass(static_cast<unsigned>(seed), 20);
    SCOPED_TRACE(describe(static_cast<unsigned>(seed), p));
    const Schedule& s = p.view(0).schedule;
    const bool together =
        s.launch != LaunchGrouping::kSeparate && s.launch != LaunchGrouping::kPaired;
    for (int i = 0; i < num_launches(p.view(0)); ++i) {
      const Launch launch = launch_at(p.view(0), i);
      const auto expect_unmixed = [&](const QueueBlock& b) {
        EXPECT_FALSE(b.mix.any()) << name(b.stage);
      };
      for_each_block(p.view(0), launch.comm, expect_unmixed);
      for_each_block(p.view(0), launch.main, [&](const QueueBlock& b) {
        const bool product =
            b.stage == first_product(p.view(0)) || b.stage == second_product(p.view(0));
        if (s.mix_run == 0 || !together || !product) return expect_unmixed(b);
        if (b.mix.any()) ++mixed;
      });
    }
    if (HasFailure()) return;
  }
  EXPECT_GT(mixed, 0);
}

void expect_positions(const TrackList& tracks) {
  std::vector<int> emitted(static_cast<std::size_t>(tracks.count));
  int position = 0;
  const int end = tracks.end();
  for (int step = 0; step < end; ++step) {
    for (int i = 0; i < tracks.count; ++i) {
      for (int b = 0; b < tracks.tracks[i].blocks_in(step); ++b) {
        ASSERT_EQ(queue_position(tracks, i, emitted[static_cast<std::size_t>(i)]++), position++);
      }
    }
  }
  ASSERT_EQ(num_blocks(tracks), position);
}

TEST(Queue, PositionsAreThoseOfTheEnumeration) {
  const int count = cases(300);
  for (unsigned seed = 1; seed <= static_cast<unsigned>(count); ++seed) {
    const RandomPass p = random_pass(seed, 20);
    SCOPED_TRACE(describe(seed, p));
    for (int i = 0; i < num_launches(p.view(0)); ++i) {
      const Launch launch = launch_at(p.view(0), i);
      expect_positions(launch.comm);
      expect_positions(launch.main);
    }
    if (HasFatalFailure()) return;
  }
}

// What a part of a pass leaves to the other part, it does not have at all.

/// Each (tile, column tile) of a GEMM stage once.
void expect_tiles_once(const PassView& v, const std::vector<Task>& tasks, Stage stage) {
  std::set<std::pair<std::int64_t, std::int64_t>> seen;
  for (const Task& t : tasks) {
    if (t.stage != stage) continue;
    ASSERT_TRUE(seen.emplace(t.m, t.n).second);
    ASSERT_EQ(t.expert, v.tiles[t.m].expert);
    ASSERT_EQ(t.tile, t.m * column_tiles(v, stage) + t.n);
    ASSERT_LT(t.n, column_tiles(v, stage));
  }
  const std::int64_t tiles = v.moves_data() ? v.tile_begin[v.num_blocks()] : 0;
  ASSERT_EQ(static_cast<std::int64_t>(seen.size()), tiles * column_tiles(v, stage));
  ASSERT_EQ(seen.empty() ? 0 : seen.rbegin()->first + 1, tiles);
}

/// Every pull once, in runs of at most pull_tokens.
void expect_pulls_once(const PassView& v, const std::vector<Task>& tasks) {
  std::vector<int> times(static_cast<std::size_t>(v.pull_begin[v.num_blocks()]));
  for (const Task& t : tasks) {
    if (t.stage != Stage::kDispatch) continue;
    ASSERT_GE(t.n, 1);
    ASSERT_LE(t.n, v.schedule.pull_tokens);
    ASSERT_EQ(t.tile, t.m);
    for (std::int64_t i = t.m; i < t.m + t.n; ++i) ++times.at(static_cast<std::size_t>(i));
  }
  for (const int n : times) ASSERT_EQ(n, v.moves_data() ? 1 : 0);
}

void expect_reduces_once(const PassView& v, const std::vector<Task>& tasks) {
  std::vector<int> times(static_cast<std::size_t>(v.num_token_blocks()));
  for (const Task& t : tasks) {
    if (t.stage == Stage::kReduce) ++times.at(static_cast<std::size_t>(t.m));
  }
  for (const int n : times) ASSERT_EQ(n, v.moves_data() ? 1 : 0);
}

/// Every tile of every expert's weight gradient once, in a backward pass.
void expect_wgrad_once(const PassView& v, const std::vector<Task>& tasks, Stage stage) {
  const std::int64_t rows = stage == Stage::kWgrad2 ? v.hidden : 2 * v.intermediate;
  const std::int64_t cols = stage == Stage::kWgrad2 ? v.intermediate : v.hidden;
  const std::int64_t row_tiles = ceil_div<std::int64_t>(rows, v.schedule.tile_m);
  const std::int64_t col_tiles = ceil_div<std::int64_t>(cols, v.schedule.tile_n);
  std::set<std::tuple<int, std::int64_t, std::int64_t>> seen;
  std::set<std::int64_t> numbers;
  for (const Task& t : tasks) {
    if (t.stage != stage) continue;
    ASSERT_TRUE(t.m >= 0 && t.m < row_tiles && t.n >= 0 && t.n < col_tiles);
    ASSERT_TRUE(seen.emplace(t.expert, t.m, t.n).second);
    ASSERT_TRUE(numbers.insert(t.tile).second);
  }
  const std::int64_t all = v.has_weight_grads() ? v.num_local_experts * row_tiles * col_tiles : 0;
  ASSERT_EQ(static_cast<std::int64_t>(seen.size()), all) << name(stage);
}

TEST(Queue, ThePassHasEveryTaskOnceAndNoOther) {
  for_each_rank_of_random_passes(1500, 60, [](const RoutingPlan&, const PassView& v) {
    const std::vector<Task> tasks = all_tasks(v);
    expect_pulls_once(v, tasks);
    expect_tiles_once(v, tasks, first_product(v));
    expect_tiles_once(v, tasks, second_product(v));
    expect_wgrad_once(v, tasks, Stage::kWgrad2);
    expect_wgrad_once(v, tasks, Stage::kWgrad1);
    expect_reduces_once(v, tasks);
    const std::set<Stage> stages{Stage::kDispatch, first_product(v), second_product(v),
                                 Stage::kReduce,   Stage::kWgrad2,   Stage::kWgrad1};
    for (const Task& t : tasks) ASSERT_TRUE(stages.contains(t.stage)) << name(t.stage);
  });
}

/// Where this rank's own counters stand.
using Counts = std::map<std::pair<CounterKind, std::int64_t>, std::uint64_t>;

void signal_own(const PassView& v, const Task& task, Counts& counts) {
  for_each_signal(v, task, [&](const Signal& s) {
    if (s.kind != CounterKind::kArrived) counts[{s.kind, s.index}] += s.amount;
  });
}

void expect_inputs_ahead(const PassView& v, const Task& task, Counts& counts) {
  for_each_wait(v, task, [&](const Wait& w) {
    if (w.kind == CounterKind::kPublished) {
      ASSERT_EQ(task.stage, Stage::kDispatch);
    } else if (w.kind == CounterKind::kArrived) {
      ASSERT_EQ(task.stage, Stage::kReduce);
    } else {
      ASSERT_EQ((counts[{w.kind, w.index}]), w.expected)
          << name(task.stage) << " waits for " << name(w.kind);
      ASSERT_EQ(w.peer, v.rank) << "own tasks signal it";
    }
  });
}

// The argument for deadlock freedom, task by task: what a task waits for on its own rank was
// signalled, exactly, by earlier launches, by this launch's communication queue, or by tasks ahead
// in its own queue. Dispatch waits for ranks to have begun; reduce, which is last in its queue, is
// the only one to wait for what others compute.
TEST(Queue, InputsStandAheadOfTheirUsers) {
  for_each_rank_of_random_passes(1500, 60, [](const RoutingPlan&, const PassView& v) {
    Counts counts;
    for (int i = 0; i < num_launches(v); ++i) {
      const Launch launch = launch_at(v, i);
      for (const Task& t : tasks_of(v, launch.comm)) {
        ASSERT_EQ(t.stage, Stage::kDispatch);
        signal_own(v, t, counts);
      }
      bool reducing = false;
      for (const Task& t : tasks_of(v, launch.main)) {
        ASSERT_TRUE(!reducing || t.stage == Stage::kReduce) << "reduce is last in its queue";
        reducing = t.stage == Stage::kReduce;
        expect_inputs_ahead(v, t, counts);
        signal_own(v, t, counts);
      }
      if (::testing::Test::HasFatalFailure()) return;
    }
  });
}

}  // namespace
}  // namespace uniep::testing
