#include "cpu/engine.h"

#include <algorithm>
#include <thread>

#include "base/check.h"
#include "base/cpu_info.h"
#include "base/deadline.h"
#include "base/error_of.h"
#include "base/wait_error.h"
#include "group/backoff.h"
#include "layer/options.h"
#include "schedule/queue_table.h"
#include "schedule/roles.h"

namespace uniep::cpu {
namespace {

std::int64_t nanoseconds(Clock::time_point t) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(t.time_since_epoch()).count();
}

/// Bytes of one pull: its token, and what goes with each of its rows.
std::int64_t pulled_bytes(const WireBytes& wire, const Pull& pull) {
  return wire.pulled_token + std::int64_t{pull.num_rows} * wire.pulled_row;
}

/// Bytes behind a push task's signal of `elements`, which are whole rows of its tile. What goes
/// with each row goes with the tile of its first columns.
std::int64_t pushed_bytes(const PassView& v, const Task& task, std::int64_t elements) {
  const std::int64_t rows = elements / column_tile(stage_grid(v, task.stage), task.n).count;
  const WireBytes& wire = v.stage(task.stage).wire;
  return elements * wire.pushed_element + (task.n == 0 ? rows * wire.pushed_row : 0);
}

}  // namespace

Engine::Engine(CpuGroup& group, int rank, Counters& counters, const LayerOptions& options)
    : group_(group),
      rank_(rank),
      counters_(counters),
      fault_injection_(options.fault_injection),
      timeout_ms_(wait_limit_ms(options)) {}

int Engine::num_workers(const Schedule& s) const {
  return cpu_workers(s, usable_cpus(), group_.ranks_of_machine());
}

void Engine::run(const PassContext& ctx, PassStats& stats, std::vector<TimelineEvent>* timeline) {
  const int workers = num_workers(ctx.view.schedule);
  while (static_cast<int>(workers_.size()) < workers) {
    Worker& w = workers_.emplace_back();
    w.index = static_cast<int>(workers_.size()) - 1;
    w.delays.seed(static_cast<std::uint32_t>(fault_injection_.seed +
                                             1000003u * static_cast<unsigned>(rank_) +
                                             static_cast<unsigned>(w.index)));
  }
  for (Worker& w : workers_) w.stats = {};
  error_ = nullptr;
  if (ctx.view.moves_data()) publish(ctx.view);

  const int launches = num_launches(ctx.view);
  for (int i = 0; i < launches && !error_; ++i) {
    try {
      run_launch(ctx, i, workers, timeline != nullptr);
    } catch (...) {  // no threads, no memory
      fail(std::current_exception());
    }
  }
  if (error_) std::rethrow_exception(error_);

  stats.workers = workers;
  stats.launches = launches;
  for (Worker& w : workers_) {
    for (std::size_t s = 0; s < stats.stages.size(); ++s) {
      stats.stages[s].tasks += w.stats[s].tasks;
      stats.stages[s].busy_s += w.stats[s].busy_s;
      stats.stages[s].wait_s += w.stats[s].wait_s;
      stats.stages[s].link_s += w.stats[s].link_s;
    }
    if (timeline != nullptr) timeline->insert(timeline->end(), w.events.begin(), w.events.end());
    w.events.clear();
  }
}

void Engine::publish(const PassView& v) {
  for_each_signal(v, Task{.stage = Stage::kEnter}, [&](const Signal& s) {
    random_delay(workers_.front());
    add(counters_.counter(s.kind, s.rank, s.index), s.amount);
  });
}

void Engine::run_launch(const PassContext& ctx, int index, int workers, bool record) {
  const PassView& v = ctx.view;
  const Launch launch = launch_at(v, index);
  const QueueTable comm_table(v, launch.comm);
  const QueueTable main_table(v, launch.main);
  SharedQueue comm{comm_table.view()};
  SharedQueue main{main_table.view()};

  const Roles roles = launch_roles(v, launch, workers);
  const int number = launch_number(v, index);
  pool_.run(workers, [&](int i) {
    Worker& worker = workers_[static_cast<std::size_t>(i)];
    worker.last_pull.reset();
    try {
      const bool dispatches = i < roles.dispatchers;
      if (dispatches) drain(ctx, comm, worker, number, record);
      if (!dispatches || roles.join) drain(ctx, main, worker, number, record);
    } catch (...) {
      fail(std::current_exception());
    }
  });
}

/// Keeps a worker's error for `run`, the first original one rather than the report of a peer's, and
/// ends the waits of everyone else.
void Engine::fail(std::exception_ptr error) {
  const std::scoped_lock lock(error_mutex_);
  bool original = true;
  try {
    std::rethrow_exception(error);
  } catch (const Error& e) {
    original = e.code() != ErrorCode::kPeerFailed;
    group_.failure().raise(rank_, e.what());
  } catch (const std::exception& e) {
    group_.failure().raise(rank_, error_of(e).what());
  }
  if (!error_ || (original && !error_is_original_)) {
    error_ = error;
    error_is_original_ = original;
  }
}

void Engine::drain(const PassContext& ctx, SharedQueue& queue, Worker& worker, int launch,
                   bool record) {
  const std::int64_t size = queue.view.size();
  for (;;) {
    const std::int64_t i = queue.next.fetch_add(1, std::memory_order_relaxed);
    if (i >= size) return;
    const Draw draw = queue_draw(ctx.view, queue.view, i);
    for (std::uint32_t t = 0; t < draw.count; ++t) {
      group_.failure().check();
      const TimelineEvent event = run_task(ctx, draw.task(ctx.view, t), worker, launch);
      if (record) worker.events.push_back(event);
    }
  }
}

TimelineEvent Engine::run_task(const PassContext& ctx, const Task& task, Worker& worker,
                               int launch) {
  TimelineEvent event{.pass = ctx.view.pass,
                      .stage = task.stage,
                      .worker = worker.index,
                      .processor = worker.index,
                      .launch = launch,
                      .expert = task.expert < 0 ? -1 : ctx.view.global_expert(task.expert),
                      .tile = task.tile};
  execute(ctx, task, worker, event);
  StageStats& stats = worker.stats[static_cast<std::size_t>(task.stage)];
  ++stats.tasks;
  stats.wait_s += static_cast<double>(event.ready_ns - event.begin_ns) * 1e-9;
  stats.link_s += static_cast<double>(event.link_ns) * 1e-9;
  stats.busy_s += static_cast<double>(event.end_ns - event.ready_ns - event.link_ns) * 1e-9;
  return event;
}

void Engine::execute(const PassContext& ctx, const Task& task, Worker& worker,
                     TimelineEvent& event) {
  event.begin_ns = nanoseconds(Clock::now());
  wait_for_inputs(ctx, task, worker);
  const Clock::time_point ready = Clock::now();
  event.ready_ns = nanoseconds(ready);

  if (ctx.view.stage(task.stage).side == StageSide::kPull) {
    wait_for_pulls(ctx, task, worker);
    event.link_ns = nanoseconds(Clock::now()) - event.ready_ns;
  } else {
    worker.last_pull.reset();
  }
  run_stage(ctx, task, worker.scratch);
  signal(ctx, task, worker);
  if (!worker.pushes.empty()) {
    const Clock::time_point pushed = Clock::now();
    limit_pushes(ctx, worker);
    event.link_ns += nanoseconds(Clock::now()) - nanoseconds(pushed);
  }
  event.end_ns = nanoseconds(Clock::now());
}

void Engine::wait_for_inputs(const PassContext& ctx, const Task& task, Worker& worker) {
  for_each_wait(ctx.view, task, [&](const Wait& wait) {
    random_delay(worker);
    wait_for(wait, task);
  });
}

void Engine::wait_for(const Wait& wait, const Task& task) {
  const auto reached = [&](std::uint32_t seen) {
    // Counts above the base are compared as signed differences: `published` may lie below it.
    return static_cast<std::int32_t>(seen - wait.expected) >= 0;
  };
  if (reached(counters_.seen(wait.kind, wait.index, wait.owner))) [[likely]]
    return;

  const auto limit = Deadline::in(std::chrono::milliseconds(timeout_ms_));
  Backoff backoff;
  while (!reached(counters_.seen(wait.kind, wait.index, wait.owner))) {
    group_.failure().check();
    if (const auto end = group_.end_of(wait.peer)) {
      if (reached(counters_.seen(wait.kind, wait.index, wait.owner))) return;
      group_.failure().raise(rank_, wait.peer, *end);
      continue;  // and throw what has been raised first
    }
    if (limit.expired()) {
      throw wait_error({.rank = rank_,
                        .stage = name(task.stage),
                        .tile = task.tile,
                        .peer = wait.peer,
                        .expected = wait.expected,
                        .seen = counters_.seen(wait.kind, wait.index, wait.owner),
                        .limit_ms = timeout_ms_},
                       name(wait.kind));
    }
    backoff.pause();
  }
}

/// A worker that pulls task after task asks for the next transfer while the last is under way, as a
/// kernel with more than one buffer does: the link does not idle while the worker wakes and copies.
void Engine::wait_for_pulls(const PassContext& ctx, const Task& task, Worker& worker) {
  Link& link = group_.link();
  if (!link.enabled()) return;
  const PassView& v = ctx.view;
  const Clock::time_point asked = worker.last_pull.value_or(Clock::now());
  Clock::time_point done = asked;
  for (std::int64_t i = task.first_pull(); i < task.end_pull();) {
    const int source = v.pulls[i].source;
    std::int64_t bytes = 0;
    for (; i < task.end_pull() && v.pulls[i].source == source; ++i) {
      bytes += pulled_bytes(v.stage(task.stage).wire, v.pulls[i]);
    }
    done = std::max(done, link.reserve(here(source), rank_, bytes, asked));
  }
  worker.last_pull = done;
  sleep_until(done);
}

void Engine::signal(const PassContext& ctx, const Task& task, Worker& worker) {
  if (withheld(task)) return;
  if (ctx.view.stage(task.stage).side == StageSide::kRail) return put(ctx, task, worker);
  SignalCourier* courier = group_.courier();
  Delivery delivery;
  for_each_signal(ctx.view, task, [&](const Signal& s) {
    random_delay(worker);
    std::uint32_t* counter = counters_.counter(s.kind, s.rank, s.index);
    if (here(s.rank) == rank_ || courier == nullptr) {
      add(counter, s.amount);
      return;
    }
    if (s.rank != delivery.rank) deliver(delivery);  // a tile's rows are sorted by rank
    delivery.rank = s.rank;
    delivery.bytes += pushed_bytes(ctx.view, task, s.amount);
    delivery.adds.push_back({counter, s.amount});
  });
  deliver(delivery);
  if (delivery.arrival) worker.pushes.push_back(*delivery.arrival);
}

/// Sends what was pushed to one rank: it is seen when the link has carried it.
void Engine::deliver(Delivery& delivery) {
  if (delivery.adds.empty()) return;
  const Clock::time_point due =
      group_.link().reserve(rank_, here(delivery.rank), delivery.bytes, Clock::now());
  group_.courier()->send(due, counters_.heap_of(delivery.rank), std::move(delivery.adds));
  delivery.adds.clear();
  delivery.bytes = 0;
  delivery.arrival = std::max(due, delivery.arrival.value_or(due));
}

/// Who has the rank's memory on this host: itself, or a relay.
int Engine::here(int rank) const {
  const RankLayout& layout = group_.layout();
  return layout.relay(rank, layout.host_of(rank_));
}

/// Sends what the task has collected to another host, with its signals.
void Engine::put(const PassContext& ctx, const Task& task, Worker& worker) {
  RailBlock& block = worker.scratch.block;
  for_each_signal(ctx.view, task, [&](const Signal& s) {
    block.signals.push_back({.counter = counters_.offset(s.kind, s.rank, s.index),
                             .local = group_.layout().local_of(s.rank),
                             .amount = s.amount});
  });
  if (block.signals.empty()) return;  // there was nothing to collect
  random_delay(worker);
  group_.rail(rank_).put(task.host(), ctx.rail_memory, block);
}

void Engine::limit_pushes(const PassContext& ctx, Worker& worker) {
  const auto depth = static_cast<std::size_t>(ctx.view.schedule.push_depth);
  while (worker.pushes.size() > depth) {
    sleep_until(worker.pushes.front());
    worker.pushes.pop_front();
  }
}

void Engine::sleep_until(Clock::time_point when) {
  constexpr std::chrono::milliseconds kNap(20);  // between looks at the failure latch
  while (Clock::now() < when) {
    group_.failure().check();
    std::this_thread::sleep_until(std::min(when, Clock::now() + kNap));
  }
}

void Engine::random_delay(Worker& worker) {
  if (fault_injection_.max_delay_us == 0) [[likely]]
    return;
  // Half of the time none at all: delays next to none find more orders than delays everywhere.
  const auto delay = static_cast<int>(worker.delays() %
                                      (2u * static_cast<unsigned>(fault_injection_.max_delay_us)));
  if (delay < fault_injection_.max_delay_us)
    std::this_thread::sleep_for(std::chrono::microseconds(delay));
}

bool Engine::withheld(const Task& task) const {
  return fault_injection_.withhold_rank == rank_ && fault_injection_.withhold_stage == task.stage &&
         fault_injection_.withhold_tile == task.tile;
}

}  // namespace uniep::cpu
