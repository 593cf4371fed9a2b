#include "tune/simulation.h"

#include <algorithm>
#include <deque>
#include <limits>
#include <memory>
#include <optional>
#include <queue>

#include "base/check.h"
#include "schedule/dependencies.h"
#include "schedule/roles.h"
#include "tune/cores.h"
#include "tune/task_cost.h"

namespace uniep::tune {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr double kDrawDelay = 1e-7;  // lets all workers draw before any draws again

/// A counter of one rank: how far it has been advanced, and when the last of that is visible.
struct Counter {
  std::uint32_t seen = 0;
  int first_waiter = -1;  // unit, or -1
  double visible = 0;
};

/// The counters of one rank, by kind and index.
class CounterTable {
 public:
  explicit CounterTable(const PassView& v) {
    const auto tiles = v.tile_begin[v.num_blocks()];
    const std::int64_t rows = v.segment_begin[v.num_local_experts];
    const std::int64_t sizes[kNumCounterKinds] = {
        v.num_ranks, ceil_div<std::int64_t>(rows, v.rows_per_counter()), tiles, v.num_local_experts,
        v.num_token_blocks() * v.num_ranks};
    std::int64_t total = 0;
    for (int kind = 0; kind < kNumCounterKinds; ++kind) {
      begin_[kind] = total;
      total += sizes[kind];
    }
    counters_.resize(static_cast<std::size_t>(total));
  }
  Counter& at(CounterKind kind, std::int64_t index) {
    return counters_[static_cast<std::size_t>(begin_[static_cast<int>(kind)] + index)];
  }

 private:
  std::int64_t begin_[kNumCounterKinds] = {};
  std::vector<Counter> counters_;
};

/// What draws tasks from one queue and runs them one after another: a worker in the main queue, or
/// one of a worker's lanes in the communication queue.
struct Unit {
  int rank = 0;    // index among the simulated ones
  int worker = 0;  // of the rank
  bool in_comm = false;
  bool computing = false;
  bool finished = false;
  int next_waiter = -1;
  std::uint32_t expected = 0;  // of the counter that it waits for
  std::deque<Task> hand{};     // drawn, the one at work first
  double begun = 0;            // its wait for inputs
  double ready = 0;
  double linked = 0;            // seconds that the task at hand waited for the link
  double released = 0;          // when it could go on, its pushes being few enough
  double last_pull = -1;        // arrival, where its last task was a pull too
  std::deque<double> pushes{};  // arrivals of those under way
};

struct RankState {
  std::unique_ptr<PassOrder> order;
  CounterTable counters;
  TaskCosts costs;
  std::vector<Launch> launches;
  std::vector<Queue> comm;  // by launch
  std::vector<Queue> main;
  int launch = -1;
  std::int64_t next_comm = 0;
  std::int64_t next_main = 0;
  std::vector<int> lanes_left;  // of each worker, in the communication queue
  int active = 0;               // units that have not run out of tasks
  int first_unit = 0;
  int pulling = 0;  // dispatch tasks under way
  // Where it stands for all ranks: its pushes, which count as everybody's.
  Counter mirrored{};
  std::int64_t pushes_left = 0;
  double done = 0;
  PassStats stats{};
  std::vector<TimelineEvent> timeline{};

  const PassView& view() const { return order->view(); }
};

class Simulation {
 public:
  Simulation(std::span<const RoutingPlan> plans, Pass pass, const Schedule& schedule,
             const MachineProfile& profile, const SimulationOptions& options);

  SimulatedPass run();

 private:
  enum class Step { kTake, kDraw, kWait, kPulled, kPushed, kLaunch };
  struct Event {
    double time;
    std::int64_t order;  // of equal times, the earlier made goes first
    Step step;
    int target;  // a unit, or a rank for kLaunch
    bool operator>(const Event& other) const {
      return time != other.time ? time > other.time : order > other.order;
    }
  };

  void at(double time, Step step, int target) { events_.push({time, next_order_++, step, target}); }
  void handle(const Event& event);
  void begin_launch(int rank);
  void take(int unit);
  bool draw(Unit& unit);
  void retire(int unit);
  void join(RankState& r, Unit& unit);
  void wait(int unit);
  std::optional<double> block(RankState& r, int unit, const Wait& wait);
  double seen_at(const Unit& unit, double visible) const;
  void start(int unit);
  double woken(double when) const;
  void compute(int unit);
  void finish(int unit);
  void signal(int unit, const Task& task);
  void advance(Counter& counter, std::uint32_t amount, double visible);
  void note(RankState& r, const Unit& unit, const Task& task);
  std::size_t push_depth() const;
  Roles roles(const RankState& r) const;

  const MachineProfile& profile_;
  const SimulationOptions& options_;
  const Schedule schedule_;
  const bool mirrored_;
  const int workers_;
  const std::int64_t push_bytes_;  // in a row's segment of a tile
  double now_ = 0;
  std::int64_t next_order_ = 0;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  Cores cores_;
  Network network_;
  std::deque<RankState> ranks_;
  std::vector<Unit> units_;

  struct Run {  // of a task's signals to one rank, which stand together
    int rank;
    double elements;
  };
  std::vector<Run> runs_;
  std::vector<Signal> remote_;
};

Simulation::Simulation(std::span<const RoutingPlan> plans, Pass pass, const Schedule& schedule,
                       const MachineProfile& profile, const SimulationOptions& options)
    : profile_(profile),
      options_(options),
      schedule_(schedule),
      mirrored_(static_cast<int>(plans.size()) < plans[0].num_ranks()),
      workers_(simulated_workers(profile, schedule, plans[0].num_ranks())),
      push_bytes_(min_of<std::int64_t>(schedule.tile_n, plans[0].problem().hidden) * 2),
      cores_(profile.cores),
      network_(profile.link, options.topology, plans[0].num_ranks(), mirrored_) {
  for (const RoutingPlan& plan : plans) {
    auto order = std::make_unique<PassOrder>(plan.data(), pass, schedule);
    const PassView& v = order->view();
    CounterTable counters(v);
    TaskCosts costs(profile, v);
    RankState& r = ranks_.emplace_back(RankState{.order = std::move(order),
                                                 .counters = std::move(counters),
                                                 .costs = costs,
                                                 .launches = {},
                                                 .comm = {},
                                                 .main = {},
                                                 .lanes_left = {}});
    for (int i = 0; i < num_launches(v); ++i) {
      r.launches.push_back(launch_at(v, i));
      r.comm.emplace_back(r.view(), r.launches.back().comm);
      r.main.emplace_back(r.view(), r.launches.back().main);
    }
    r.pushes_left = v.tile_begin[v.num_blocks()] * column_tiles(v, v.second_gemm());
    r.stats.pass = pass;
    r.stats.workers = workers_;
    r.stats.launches = static_cast<int>(r.launches.size());
  }
}

SimulatedPass Simulation::run() {
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    RankState& r = ranks_[i];
    const PassView& v = r.view();
    const double enter = profile_.enter.fixed +
                         profile_.enter.per_byte * static_cast<double>(v.tokens * row_bytes(v));
    at(enter, Step::kLaunch, static_cast<int>(i));
    for (RankState& peer : ranks_) {
      for (int source = 0; source < v.num_ranks; ++source) {
        if (!mirrored_ && source != v.rank) continue;
        Counter& published = peer.counters.at(CounterKind::kPublished, source);
        published.seen = 1;
        published.visible = enter + (source == peer.view().rank ? 0 : profile_.wake.flag_s);
      }
    }
    // Nothing to push, so nothing to wait for.
    if (r.pushes_left == 0) r.mirrored.seen = 1;
  }
  for (;;) {
    const double computed = cores_.next();
    const double scheduled = events_.empty() ? kNever : events_.top().time;
    if (computed == kNever && scheduled == kNever) break;
    now_ = std::min(computed, scheduled);
    if (computed <= scheduled) {
      finish(cores_.pop());
    } else {
      const Event event = events_.top();
      events_.pop();
      handle(event);
    }
  }
  SimulatedPass result;
  for (RankState& r : ranks_) {
    ensure(r.launch == static_cast<int>(r.launches.size()), "the simulated pass of rank ",
           r.view().rank, " stands still in launch ", r.launch, " of ", to_string(schedule_));
    r.stats.elapsed_s = r.done;
    result.seconds = std::max(result.seconds, r.done);
    result.stats.push_back(r.stats);
    result.timeline.push_back(std::move(r.timeline));
  }
  return result;
}

void Simulation::handle(const Event& event) {
  switch (event.step) {
    case Step::kLaunch:
      return begin_launch(event.target);
    case Step::kTake:
      return take(event.target);
    case Step::kDraw: {
      Unit& unit = units_[static_cast<std::size_t>(event.target)];
      // The one at work does not count.
      const auto most = static_cast<std::size_t>(profile_.prefetch + 1);
      if (unit.computing && unit.hand.size() < most && draw(unit) && unit.hand.size() < most) {
        at(now_ + kDrawDelay, Step::kDraw, event.target);
      }
      return;
    }
    case Step::kWait:
      return wait(event.target);
    case Step::kPulled:
      return compute(event.target);
    case Step::kPushed:
      return take(event.target);
  }
}

Roles Simulation::roles(const RankState& r) const {
  return launch_roles(r.view(), r.launches[static_cast<std::size_t>(r.launch)], workers_);
}

void Simulation::begin_launch(int rank) {
  RankState& r = ranks_[static_cast<std::size_t>(rank)];
  ++r.launch;
  if (r.launch == static_cast<int>(r.launches.size())) {
    r.done = now_;
    return;
  }
  r.next_comm = r.next_main = 0;
  const int first = roles(r).dispatchers;
  r.lanes_left.assign(static_cast<std::size_t>(workers_), 0);
  for (int w = 0; w < workers_; ++w) {
    const int lanes = w < first ? profile_.lanes : 1;
    if (w < first) r.lanes_left[static_cast<std::size_t>(w)] = lanes;
    for (int lane = 0; lane < lanes; ++lane) {
      Unit& unit = units_.emplace_back();
      unit.rank = rank;
      unit.worker = w;
      unit.in_comm = w < first;
      ++r.active;
      at(now_, Step::kTake, static_cast<int>(units_.size()) - 1);
    }
  }
}

bool Simulation::draw(Unit& unit) {
  RankState& r = ranks_[static_cast<std::size_t>(unit.rank)];
  const auto launch = static_cast<std::size_t>(r.launch);
  const QueueView queue = (unit.in_comm ? r.comm : r.main)[launch].view();
  std::int64_t& next = unit.in_comm ? r.next_comm : r.next_main;
  if (next == queue.size()) return false;
  unit.hand.push_back(queue_task(r.view(), queue, next++));
  return true;
}

void Simulation::take(int index) {
  Unit& unit = units_[static_cast<std::size_t>(index)];
  if (unit.hand.empty() && !draw(unit)) return retire(index);
  unit.begun = now_;
  unit.linked = 0;
  wait(index);
}

void Simulation::retire(int index) {
  Unit& unit = units_[static_cast<std::size_t>(index)];
  if (unit.finished) return;
  RankState& r = ranks_[static_cast<std::size_t>(unit.rank)];
  if (unit.in_comm) {
    if (--r.lanes_left[static_cast<std::size_t>(unit.worker)] == 0 && roles(r).join) {
      unit.in_comm = false;
      unit.last_pull = -1;
      return take(index);
    }
  }
  unit.finished = true;
  if (--r.active == 0) at(now_ + profile_.launch_s, Step::kLaunch, unit.rank);
}

/// When a unit that has waited since `begun` looks next, at or after `visible`.
double Simulation::seen_at(const Unit& unit, double visible) const {
  const WakeProfile& wake = profile_.wake;
  if (wake.first_sleep_s == 0 || visible <= unit.begun) return std::max(visible, now_);
  double look = unit.begun;
  double sleep = wake.first_sleep_s;
  while (look < visible) {
    look += sleep + wake.sleep_slack_s;
    sleep = std::min(2 * sleep, wake.longest_sleep_s);
  }
  return std::max(look, now_);
}

/// Nothing where the wait is over; else when it will be, or kNever where the unit was put in the
/// counter's list of waiters.
std::optional<double> Simulation::block(RankState& r, int index, const Wait& w) {
  const bool of_peer = mirrored_ && w.kind == CounterKind::kArrived && w.peer != r.view().rank;
  Counter& counter = of_peer ? r.mirrored : r.counters.at(w.kind, w.index);
  const std::uint32_t expected = of_peer ? 1 : w.expected;
  if (counter.seen >= expected) {
    if (counter.visible <= now_) return std::nullopt;
    return counter.visible;
  }
  Unit& unit = units_[static_cast<std::size_t>(index)];
  unit.expected = expected;
  unit.next_waiter = counter.first_waiter;
  counter.first_waiter = index;
  return kNever;
}

void Simulation::wait(int index) {
  const Unit& unit = units_[static_cast<std::size_t>(index)];
  RankState& r = ranks_[static_cast<std::size_t>(unit.rank)];
  std::optional<double> blocked;
  for_each_wait(r.view(), unit.hand.front(), [&](const Wait& w) {
    if (!blocked) blocked = block(r, index, w);
  });
  if (!blocked) return start(index);
  if (*blocked != kNever) at(seen_at(unit, *blocked), Step::kWait, index);
}

void Simulation::start(int index) {
  Unit& unit = units_[static_cast<std::size_t>(index)];
  RankState& r = ranks_[static_cast<std::size_t>(unit.rank)];
  const PassView& v = r.view();
  const Task task = unit.hand.front();
  unit.ready = now_;
  if (task.stage != Stage::kDispatch) {
    unit.last_pull = -1;
    return compute(index);
  }
  // As Engine::wait_for_pulls: a worker asks for its next transfer while the last is under way.
  const double asked = unit.last_pull < 0 ? now_ : unit.last_pull;
  double done = asked;
  for (std::int64_t i = task.m; i < task.m + task.n;) {
    const int source = v.pulls[i].source;
    std::int64_t bytes = 0;
    for (; i < task.m + task.n && v.pulls[i].source == source; ++i) bytes += row_bytes(v);
    done = std::max(done, network_.transfer(v.rank, source, v.rank, static_cast<double>(bytes),
                                            asked, profile_.link.pull_bytes_per_s));
  }
  unit.last_pull = done;
  unit.linked = woken(done) - now_;
  ++r.pulling;
  at(woken(done), Step::kPulled, index);
}

/// When a worker that sleeps until `when` goes on.
double Simulation::woken(double when) const {
  return when > now_ ? when + profile_.wake.sleep_slack_s : now_;
}

void Simulation::compute(int index) {
  Unit& unit = units_[static_cast<std::size_t>(index)];
  RankState& r = ranks_[static_cast<std::size_t>(unit.rank)];
  const Task& task = unit.hand.front();
  double work = r.costs.of(r.view(), task);
  if (is_product(task.stage) && r.pulling > 0) work *= profile_.beside_link;
  unit.computing = true;
  cores_.start(index, work, now_);
  if (profile_.prefetch > 0 && !unit.in_comm) at(now_ + kDrawDelay, Step::kDraw, index);
}

std::size_t Simulation::push_depth() const {
  return static_cast<std::size_t>(profile_.push_depth >= 0 ? profile_.push_depth
                                                           : schedule_.push_depth);
}

void Simulation::finish(int index) {
  Unit& unit = units_[static_cast<std::size_t>(index)];
  RankState& r = ranks_[static_cast<std::size_t>(unit.rank)];
  const Task task = unit.hand.front();
  unit.hand.pop_front();
  unit.computing = false;
  if (task.stage == Stage::kDispatch) --r.pulling;
  signal(index, task);
  double free = now_;
  while (!unit.pushes.empty() && unit.pushes.front() <= now_) unit.pushes.pop_front();
  while (unit.pushes.size() > push_depth()) {
    free = std::max(free, unit.pushes.front());
    unit.pushes.pop_front();
  }
  free = woken(free);
  unit.released = free;
  note(r, unit, task);
  if (free > now_) return at(free, Step::kPushed, index);
  take(index);
}

/// Signals to this rank are visible at once, those to others when the link has carried what was
/// pushed to them.
void Simulation::signal(int index, const Task& task) {
  Unit& unit = units_[static_cast<std::size_t>(index)];
  RankState& r = ranks_[static_cast<std::size_t>(unit.rank)];
  const PassView& v = r.view();
  runs_.clear();
  remote_.clear();
  for_each_signal(v, task, [&](const Signal& s) {
    if (s.rank == v.rank) return advance(r.counters.at(s.kind, s.index), s.amount, now_);
    if (runs_.empty() || runs_.back().rank != s.rank) runs_.push_back({s.rank, 0});
    runs_.back().elements += s.amount;
    if (!mirrored_) remote_.push_back(s);
  });
  const LinkProfile& link = profile_.link;
  const double rate = link.push.points.empty() ? 0 : link.push(static_cast<double>(push_bytes_));
  double last = now_;
  std::size_t next = 0;
  for (const Run& run : runs_) {
    const double arrival =
        network_.transfer(v.rank, v.rank, run.rank, 2 * run.elements, now_, rate);
    last = std::max(last, arrival);
    for (; next < remote_.size() && remote_[next].rank == run.rank; ++next) {
      RankState& peer = ranks_[static_cast<std::size_t>(run.rank)];
      advance(peer.counters.at(remote_[next].kind, remote_[next].index), remote_[next].amount,
              arrival + profile_.wake.flag_s);
    }
  }
  if (!runs_.empty() && link.bytes_per_s > 0) unit.pushes.push_back(last);
  if (mirrored_ && task.stage == v.second_gemm()) {
    r.mirrored.visible = std::max(r.mirrored.visible, last + profile_.wake.flag_s);
    if (--r.pushes_left == 0) advance(r.mirrored, 1, r.mirrored.visible);
  }
}

void Simulation::advance(Counter& counter, std::uint32_t amount, double visible) {
  counter.seen += amount;
  counter.visible = std::max(counter.visible, visible);
  int* link = &counter.first_waiter;
  while (*link >= 0) {
    const int index = *link;
    Unit& unit = units_[static_cast<std::size_t>(index)];
    if (counter.seen < unit.expected) {
      link = &unit.next_waiter;
      continue;
    }
    *link = unit.next_waiter;
    at(seen_at(unit, counter.visible), Step::kWait, index);
  }
}

void Simulation::note(RankState& r, const Unit& unit, const Task& task) {
  const double pushed = unit.released - now_;  // the wait for earlier pushes that comes now
  StageStats& stats = r.stats[task.stage];
  ++stats.tasks;
  stats.wait_s += unit.ready - unit.begun;
  stats.link_s += unit.linked + pushed;
  stats.busy_s += now_ - unit.ready - unit.linked;
  if (!options_.record_timeline) return;
  const auto ns = [](double seconds) { return static_cast<std::int64_t>(seconds * 1e9); };
  const PassView& v = r.view();
  r.timeline.push_back({.pass = v.pass,
                        .stage = task.stage,
                        .worker = unit.worker,
                        .launch = r.launch,
                        .expert = task.expert < 0 ? -1 : v.rank * v.num_local_experts + task.expert,
                        .tile = task.tile,
                        .begin_ns = ns(unit.begun),
                        .ready_ns = ns(unit.ready),
                        .link_ns = ns(unit.linked + pushed),
                        .end_ns = ns(unit.released)});
}

}  // namespace

int simulated_workers(const MachineProfile& profile, const Schedule& s, int ranks) {
  if (profile.workers > 0) return s.workers > 0 ? s.workers : profile.workers;
  return cpu_workers(s, profile.cores, ranks);
}

SimulatedPass simulate(std::span<const RoutingPlan> plans, Pass pass, const Schedule& schedule,
                       const MachineProfile& profile, const SimulationOptions& options) {
  return Simulation(plans, pass, schedule, profile, options).run();
}

}  // namespace uniep::tune
