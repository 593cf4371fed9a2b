// A sequential simulation of all ranks over the pure functions alone: workers take tasks in the
// order of their queues, block on waits, and are stepped in a random order. It completes for any
// number of workers, and no task runs before what it reads has been written, which is tracked apart
// from the counters.
#include <gtest/gtest.h>

#include <map>
#include <set>
#include <tuple>

#include "schedule/random_pass.h"
#include "schedule/roles.h"
#include "support/cases.h"

namespace uniep::testing {
namespace {

using CounterKey = std::tuple<CounterKind, int, std::int64_t>;  // kind, rank, index

/// What has been written, by meaning. Every question is put when a task starts.
class Data {
 public:
  explicit Data(const RandomPass& p) : p_(p) {}

  void publish(int rank) { published_.insert(rank); }

  bool inputs_written(const PassView& v, const Task& t) {
    switch (t.stage) {
      case Stage::kDispatch:
        for (std::int64_t i = t.m; i < t.m + t.n; ++i) {
          if (!published_.contains(v.pulls[i].source)) return false;
        }
        return true;
      case Stage::kFc1:
      case Stage::kDfc2:
        return rows_dispatched(v, v.tiles[t.m]);
      case Stage::kFc2:
      case Stage::kDfc1:
        return computed_[{v.rank, v.tiles[t.m].first_row}] == columns_of_first_gemm(v);
      case Stage::kWgrad2:
      case Stage::kWgrad1:
        if (!v.moves_data()) return true;  // the part before this one has come to its end
        for (const Tile& tile : plan(v).tiles(v.schedule.tile_m)) {
          if (tile.expert == t.expert &&
              computed_[{v.rank, tile.first_row}] != columns_of_first_gemm(v)) {
            return false;
          }
        }
        return true;
      default:
        return rows_came_back(v, t);
    }
  }

  void run(const PassView& v, const Task& t) {
    if (t.stage == Stage::kDispatch) {
      for (std::int64_t i = t.m; i < t.m + t.n; ++i) {
        for (int c = 0; c < v.pulls[i].num_rows; ++c) {
          rows_.insert({v.rank, v.pull_rows[v.pulls[i].first_row + c]});
        }
      }
    } else if (t.stage == v.first_gemm()) {
      ++computed_[{v.rank, v.tiles[t.m].first_row}];
    } else if (t.stage == v.second_gemm()) {
      const Tile& tile = v.tiles[t.m];
      const std::int64_t cols =
          min_of<std::int64_t>(v.schedule.tile_n, v.hidden - t.n * v.schedule.tile_n);
      for (int i = 0; i < tile.rows; ++i) {
        const RowOrigin& o = v.row_origin[tile.first_row + i];
        pushed_[{o.source, std::int64_t{o.token} * v.topk + o.slot}] += cols;
      }
    }
  }

 private:
  const RoutingPlan& plan(const PassView& v) const {
    return p_.plans[static_cast<std::size_t>(v.rank)];
  }

  static std::int64_t columns_of_first_gemm(const PassView& v) {
    const std::int64_t n = v.pass == Pass::kForward ? v.schedule.tile_n / 2 : v.schedule.tile_n;
    return ceil_div(v.intermediate, n);
  }

  bool rows_dispatched(const PassView& v, const Tile& tile) const {
    for (int i = 0; i < tile.rows; ++i) {
      if (!rows_.contains({v.rank, tile.first_row + i})) return false;
    }
    return true;
  }

  bool rows_came_back(const PassView& v, const Task& t) {
    const std::int64_t first = t.m * v.schedule.token_block * v.topk;
    const std::int64_t end =
        min_of<std::int64_t>(first + v.schedule.token_block * v.topk, v.tokens * v.topk);
    for (std::int64_t slot = first; slot < end; ++slot) {
      if (v.topk_ids[slot] >= 0 && pushed_[{v.rank, slot}] != v.hidden) return false;
    }
    return true;
  }

  const RandomPass& p_;
  std::set<int> published_;
  std::set<std::pair<int, std::int64_t>> rows_;
  std::map<std::pair<int, std::int64_t>, std::int64_t> computed_;  // column tiles, by first row
  std::map<std::pair<int, std::int64_t>, std::int64_t> pushed_;    // columns, by slot
};

/// One rank: its launches one after another, each with queues that its workers share.
class SimulatedRank {
 public:
  SimulatedRank(const PassView& view, int workers) : v_(view), workers_(workers) {
    begin_launch(0);
  }

  bool done() const { return launch_ == num_launches(v_); }
  int workers() const { return workers_; }
  const PassView& view() const { return v_; }

  /// The task that the worker stands at, taken from its queue when it has none.
  const Task* task_of(int worker) {
    State& s = states_[static_cast<std::size_t>(worker)];
    while (!s.task && !s.done) {
      Source& queue = s.in_comm ? comm_ : main_;
      if (queue.next < queue.tasks.size()) {
        s.task = queue.tasks[queue.next++];
      } else if (s.in_comm && s.joins) {
        s.in_comm = false;
      } else {
        s.done = true;
      }
    }
    return s.task ? &*s.task : nullptr;
  }

  void finish(int worker) { states_[static_cast<std::size_t>(worker)].task.reset(); }

  /// To the next launch, where all workers have done theirs.
  bool advance() {
    for (int i = 0; i < workers_; ++i) {
      if (task_of(i) != nullptr) return false;
    }
    begin_launch(launch_ + 1);
    return true;
  }

 private:
  struct Source {
    std::vector<Task> tasks;
    std::size_t next = 0;
  };
  struct State {
    std::optional<Task> task;
    bool in_comm = false;
    bool joins = true;
    bool done = false;
  };

  void begin_launch(int launch) {
    launch_ = launch;
    if (done()) return;
    const Launch l = launch_at(v_, launch);
    comm_ = {tasks_of(v_, l.comm)};
    main_ = {tasks_of(v_, l.main)};
    const Roles roles = launch_roles(v_, l, workers_);
    states_.assign(static_cast<std::size_t>(workers_), {});
    for (int i = 0; i < workers_; ++i) {
      State& s = states_[static_cast<std::size_t>(i)];
      s.in_comm = i < roles.dispatchers;
      s.joins = roles.join;
    }
  }

  const PassView& v_;
  const int workers_;
  int launch_ = 0;
  Source comm_;
  Source main_;
  std::vector<State> states_;
};

class Simulation {
 public:
  Simulation(const RandomPass& p, int workers, unsigned seed) : data_(p), rng_(seed) {
    for (int rank = 0; rank < p.ranks(); ++rank) ranks_.emplace_back(p.view(rank), workers);
  }

  /// Steps until everything is done; fails where nothing can move.
  void run() {
    std::size_t begun = 0;  // ranks publish one by one, at random times
    for (;;) {
      std::vector<std::pair<std::size_t, int>> ready;
      bool moved = false;
      bool all_done = true;
      for (std::size_t r = 0; r < begun; ++r) {
        while (!ranks_[r].done() && ranks_[r].advance()) moved = true;
        if (ranks_[r].done()) continue;
        all_done = false;
        for (int w = 0; w < ranks_[r].workers(); ++w) {
          const Task* task = ranks_[r].task_of(w);
          if (task != nullptr && satisfied(ranks_[r].view(), *task)) ready.emplace_back(r, w);
        }
      }
      if (begun < ranks_.size() && (ready.empty() || chance(rng_, 20))) {
        publish(static_cast<int>(begun++));
        continue;
      }
      if (all_done) break;
      ASSERT_TRUE(!ready.empty() || moved) << "deadlock";
      if (ready.empty()) continue;
      // Several steps between looks keep the simulation quick, and ready tasks stay ready.
      std::shuffle(ready.begin(), ready.end(), rng_);
      const auto steps = static_cast<std::size_t>(pick(rng_, 1, static_cast<int>(ready.size())));
      for (std::size_t i = 0; i < steps; ++i) {
        step(ranks_[ready[i].first], ready[i].second);
        if (::testing::Test::HasFatalFailure()) return;
      }
    }
    expect_totals();
  }

 private:
  void publish(int rank) {
    data_.publish(rank);
    for (const SimulatedRank& r : ranks_) {
      counts_[{CounterKind::kPublished, r.view().rank, rank}] += 1;
    }
  }

  bool satisfied(const PassView& v, const Task& task) {
    bool all = true;
    for_each_wait(v, task, [&](const Wait& w) {
      const std::uint64_t seen = counts_[{w.kind, v.rank, w.index}];
      if (seen < w.expected) all = false;
    });
    return all;
  }

  void step(SimulatedRank& rank, int worker) {
    const PassView& v = rank.view();
    const Task task = *rank.task_of(worker);
    ASSERT_TRUE(data_.inputs_written(v, task))
        << name(task.stage) << " tile " << task.tile << " of rank " << v.rank << " ran too early";
    data_.run(v, task);
    for_each_wait(v, task, [&](const Wait& w) {
      waited_for_[{w.kind, v.rank, w.index}] = w.expected;
    });
    for_each_signal(v, task, [&](const Signal& s) {
      counts_[{s.kind, s.rank, s.index}] += s.amount;
    });
    rank.finish(worker);
  }

  /// Counters end exactly where their waiters expect them, and every counter has a waiter (but for
  /// those whose users are in a later part of the pass).
  void expect_totals() {
    for (const auto& [key, expected] : waited_for_) {
      ASSERT_EQ(counts_[key], expected) << name(std::get<0>(key)) << " of rank " << std::get<1>(key)
                                        << ", index " << std::get<2>(key);
    }
    for (const auto& [key, count] : counts_) {
      if (std::get<0>(key) == CounterKind::kPublished || count == 0) continue;
      if (std::get<0>(key) == CounterKind::kExpertDone && !has_weight_grads()) continue;
      ASSERT_TRUE(waited_for_.contains(key)) << name(std::get<0>(key)) << " has no waiter";
    }
  }

  bool has_weight_grads() const { return ranks_.front().view().has_weight_grads(); }

  Data data_;
  Rng rng_;
  std::vector<SimulatedRank> ranks_;
  std::map<CounterKey, std::uint64_t> counts_;
  std::map<CounterKey, std::uint64_t> waited_for_;
};

TEST(Simulation, EveryScheduleCompletesInAnyOrderWithAnyNumberOfWorkers) {
  const int count = cases(2500);
  for (unsigned seed = 1; seed <= static_cast<unsigned>(count); ++seed) {
    const RandomPass p = random_pass(seed, 40);
    for (const int workers : {1, 2, static_cast<int>(3 + seed % 4)}) {
      SCOPED_TRACE(cat(describe(seed, p), "\n  simulated workers ", workers));
      Simulation(p, workers, seed).run();
      if (HasFatalFailure()) return;
    }
  }
}

}  // namespace
}  // namespace uniep::testing
