#pragma once

#include <gtest/gtest.h>

#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "schedule/queue.h"
#include "schedule/random_pass.h"
#include "schedule/roles.h"
#include "support/cases.h"

// A sequential simulation of all ranks over the pure functions alone: workers take tasks in the
// order of their queues, block on waits, and are stepped in a random order.

namespace uniep::testing {

using CounterKey = std::tuple<CounterKind, int, std::int64_t>;  // kind, rank, index

/// One rank: its launches one after another, each with queues that its workers share.
class InterleavedRank {
 public:
  InterleavedRank(const PassView& view, int workers) : v_(view), workers_(workers) {
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

/// All ranks of a pass, their workers stepped in a random order. `Data` knows what has been
/// written, apart from the counters.
template <class Data>
class Interleaving {
 public:
  Interleaving(const RandomPass& p, Data& data, int workers, unsigned seed)
      : data_(data), rng_(seed) {
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
    for (const InterleavedRank& r : ranks_) {
      counts_[{CounterKind::kPublished, r.view().rank, rank}] += 1;
    }
  }

  static int owner(const PassView& v, const Wait& w) { return w.owner < 0 ? v.rank : w.owner; }

  bool satisfied(const PassView& v, const Task& task) {
    bool all = true;
    for_each_wait(v, task, [&](const Wait& w) {
      const std::uint64_t seen = counts_[{w.kind, owner(v, w), w.index}];
      if (seen < w.expected) all = false;
    });
    return all;
  }

  void step(InterleavedRank& rank, int worker) {
    const PassView& v = rank.view();
    const Task task = *rank.task_of(worker);
    ASSERT_TRUE(data_.inputs_written(v, task))
        << "stage " << static_cast<int>(task.stage) << " tile " << task.tile << " of rank "
        << v.rank << " ran too early";
    data_.run(v, task);
    for_each_wait(v, task, [&](const Wait& w) {
      waited_for_[{w.kind, owner(v, w), w.index}] = w.expected;
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
      ASSERT_EQ(counts_[key], expected) << describe(key);
    }
    for (const auto& [key, count] : counts_) {
      if (std::get<0>(key) == CounterKind::kPublished || count == 0) continue;
      const CounterKind kind = std::get<0>(key);
      const bool of_weights = kind == CounterKind::kExpertDone || kind == CounterKind::kXDone;
      if (of_weights && !has_weight_grads()) continue;
      // All ranks of a host hear of a piece, even if none of its tokens is for them.
      if (kind == CounterKind::kCrossed) continue;
      // Nobody has the last experts' places in a ring after them.
      if (kind == CounterKind::kReleased) continue;
      ASSERT_TRUE(waited_for_.contains(key)) << describe(key) << " has no waiter";
    }
  }

  static std::string describe(const CounterKey& key) {
    return cat("counter of kind ", static_cast<int>(std::get<0>(key)), " of rank ",
               std::get<1>(key), ", index ", std::get<2>(key));
  }

  bool has_weight_grads() const { return ranks_.front().view().has_weight_grads(); }

  Data& data_;
  Rng rng_;
  std::vector<InterleavedRank> ranks_;
  std::map<CounterKey, std::uint64_t> counts_;
  std::map<CounterKey, std::uint64_t> waited_for_;
};

}  // namespace uniep::testing
