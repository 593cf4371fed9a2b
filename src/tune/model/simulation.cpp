#include "tune/model/simulation.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <optional>

#include "base/check.h"
#include "schedule/open_sizes.h"
#include "schedule/roles.h"
#include "schedule/token_waves.h"
#include "tune/model/cores.h"
#include "tune/model/event_queue.h"
#include "tune/model/rail_threads.h"
#include "tune/model/simulated_rank.h"

namespace uniep::tune {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

class Simulation {
 public:
  Simulation(std::span<const RoutingPlan> plans, Pass pass, const Schedule& schedule,
             const MachineProfile& profile, const SimulationOptions& options);

  SimulatedPass run();

 private:
  using Step = EventQueue::Step;

  double enter(int rank, int wave);
  void handle(const EventQueue::Event& event);
  void begin_launch(int rank);
  void take(int unit);
  bool take_task(Unit& unit);
  void retire(int unit);
  void wait(int unit);
  std::optional<double> block(SimulatedRank& r, int unit, const Wait& wait);
  double seen_at(const Unit& unit, double visible) const;
  void start(int unit);
  double woken(double when) const;
  void compute(int unit);
  void finish(int unit);
  void signal(int unit, const Task& task);
  void push(Unit& unit, SimulatedRank& r, const Task& task);
  void arrive(SimulatedRank& peer, int rank, std::span<const PushedTiles::Arrival> arrivals,
              double visible);
  void send_far(SimulatedRank& r, const Task& task);
  double carry(const Message& message);
  void finish_rail(int unit);
  void deliver(const Message& message, double visible);
  void hear(const Signal& signal, double visible);
  void advance(Counter& counter, std::uint32_t amount, double visible);
  int here(const SimulatedRank& r, int rank) const;
  SimulatedRank& simulated(int index) const { return *ranks_[static_cast<std::size_t>(index)]; }
  /// The index of a rank among the simulated ones, which follow one another.
  int index_of(int rank) const { return rank - simulated(0).view().rank; }
  SimulatedRank& rank_at(int rank) { return simulated(index_of(rank)); }
  void note(SimulatedRank& r, const Unit& unit, const Task& task);
  std::size_t push_depth() const;
  double push_held() const;
  Roles roles(const SimulatedRank& r) const;

  const MachineProfile& profile_;
  const SimulationOptions& options_;
  const Schedule schedule_;
  const StandIn stand_in_;
  const int workers_;
  const double push_rate_;  // of the link, in bytes/s; 0: its own
  double now_ = 0;
  EventQueue events_;
  Cores cores_;
  Network network_;
  RailThreads rails_;
  std::vector<std::unique_ptr<SimulatedRank>> ranks_;
  std::vector<Unit> units_;
};

/// Throws where `plans` are neither those of all ranks nor of ones that can stand for all.
StandIn stand_in_of(std::span<const RoutingPlan> plans) {
  const RankLayout& layout = plans[0].data().layout;
  const int simulated = static_cast<int>(plans.size());
  if (simulated == layout.ranks()) return StandIn::kNobody;
  if (layout.hosts == 1 && simulated == 1) return StandIn::kOneRank;
  require(layout.hosts > 1 && simulated == layout.local_ranks &&
              layout.local_of(plans[0].data().rank) == 0,
          ErrorCode::kInvalidArgument, simulated, " ranks of ", layout.ranks(), " on ",
          layout.hosts, layout.hosts == 1 ? " host" : " hosts", " are simulated; all are accepted",
          layout.hosts == 1 ? ", and one" : cat(", and the ", layout.local_ranks, " of a host"));
  return StandIn::kOneHost;
}

/// Bytes per second of pushes whose rows have so many bytes in a tile; 0: the link's own.
double push_rate(const LinkProfile& link, const Schedule& schedule, const Problem& problem) {
  if (link.push.points.empty()) return 0;
  const auto columns = static_cast<double>(min_of<std::int64_t>(schedule.tile_n, problem.hidden));
  return link.push(wire_bytes(problem, Pass::kForward).pushed_element * columns);
}

Simulation::Simulation(std::span<const RoutingPlan> plans, Pass pass, const Schedule& schedule,
                       const MachineProfile& profile, const SimulationOptions& options)
    : profile_(profile),
      options_(options),
      schedule_(with_forced_axes(schedule, plans[0].problem(), pass)),
      stand_in_(stand_in_of(plans)),
      workers_(simulated_workers(profile, schedule_, plans[0].num_ranks())),
      push_rate_(push_rate(profile.link, schedule_, plans[0].problem())),
      cores_(profile.cores),
      network_(profile.link, options.topology, plans[0].num_ranks(), stand_in_),
      rails_(options.topology, plans.size()) {
  const RankLayout& layout = plans[0].data().layout;
  const int local = options.topology.ranks_per_node;
  require(layout.hosts == 1 || local == 0 || local == layout.local_ranks,
          ErrorCode::kInvalidArgument, "ranks of a host are ", local, "; as the plans have it, ",
          layout.local_ranks, " are accepted");
  for (const RoutingPlan& plan : plans) {
    ranks_.push_back(std::make_unique<SimulatedRank>(plan.data(), pass, schedule_, profile,
                                                     workers_, options.part, *options.graph));
    SimulatedRank& r = *ranks_.back();
    r.stats.workers = workers_;
    if (stand_in_ == StandIn::kOneHost) r.other_hosts.emplace(r.view());
  }
}

SimulatedPass Simulation::run() {
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    SimulatedRank& r = *ranks_[i];
    const double entered = enter(static_cast<int>(i), 0);
    events_.at(entered, Step::kLaunch, static_cast<int>(i));
    // Nothing to push, so nothing to wait for.
    if (r.pushes_left == 0) r.mirrored.seen = 1;
    if (r.other_hosts) {
      r.other_hosts->for_each_unanswered(
          [&](const Signal& s) { hear(s, entered + profile_.wake.flag_s); });
    }
  }
  for (;;) {
    const double computed = cores_.next();
    const double scheduled = events_.next();
    if (computed == kNever && scheduled == kNever) break;
    now_ = std::min(computed, scheduled);
    if (computed <= scheduled) {
      const int unit = cores_.pop();
      RailThreads::is_rail(unit) ? finish_rail(unit) : finish(unit);
    } else {
      handle(events_.pop());
    }
  }
  SimulatedPass result;
  result.bytes = network_.bytes();
  for (const auto& rank : ranks_) {
    SimulatedRank& r = *rank;
    ensure(r.launch == static_cast<int>(r.launches.size()), "the simulated pass of rank ",
           r.view().rank, " stands still in launch ", r.launch, " of ", to_string(schedule_));
    r.stats.elapsed_s = r.done;
    result.seconds = std::max(result.seconds, r.done);
    result.launch_ends.resize(r.launch_ends.size());
    std::ranges::transform(r.launch_ends, result.launch_ends, result.launch_ends.begin(),
                           [](double a, double b) { return std::max(a, b); });
    result.stats.push_back(r.stats);
    result.timeline.push_back(std::move(r.timeline));
  }
  return result;
}

/// A rank publishes its tokens, those of a wave where they come in waves. When it is through.
double Simulation::enter(int rank, int wave) {
  SimulatedRank& r = simulated(rank);
  PassView& v = r.in_launch;
  if (!v.moves_data()) return now_;
  v.published = static_cast<std::uint32_t>(wave) + 1;
  const auto at = static_cast<std::size_t>(wave);
  const double come = at < options_.waves_come.size() ? options_.waves_come[at] : 0;
  const TokenRun tokens =
      v.comes_in_waves() ? own_tokens_that_come(v, wave) : TokenRun{0, v.tokens};
  const auto bytes = static_cast<double>(published_bytes(v, tokens.end - tokens.begin));
  const double done = std::max(now_, come) + profile_.enter.fixed + profile_.enter.per_byte * bytes;
  for (const auto& other : ranks_) {
    SimulatedRank& peer = *other;
    const PassView& p = peer.view();
    for (int source = 0; source < v.num_ranks; ++source) {
      if (stand_in_ != StandIn::kOneRank && source != v.rank) continue;
      if (!v.is_here(p.rank)) continue;
      const double visible = done + (source == p.rank ? 0 : profile_.wake.flag_s);
      for_each_counter(p.stage(Stage::kEnter).signals, [&](CounterKind kind) {
        advance(peer.counters.at(kind, source), 1, visible);
      });
    }
  }
  return done;
}

void Simulation::handle(const EventQueue::Event& event) {
  switch (event.step) {
    case Step::kLaunch:
      return begin_launch(event.target);
    case Step::kTake:
      return take(event.target);
    case Step::kWait:
      return wait(event.target);
    case Step::kPulled:
      return compute(event.target);
    case Step::kPushed:
      return take(event.target);
    case Step::kCame:
      return rails_.take({.message = event.target, .comes = true}, now_, cores_);
  }
}

Roles Simulation::roles(const SimulatedRank& r) const {
  return launch_roles(r.view(), r.launches[static_cast<std::size_t>(r.launch)], workers_);
}

void Simulation::begin_launch(int rank) {
  SimulatedRank& r = simulated(rank);
  ++r.launch;
  if (r.launch == static_cast<int>(r.launches.size())) {
    r.done = now_;
    return;
  }
  const PassView& v = r.view();
  const bool has_wave = v.comes_in_waves() && r.launch > 0 && r.launch < v.schedule.waves;
  const double begin = has_wave ? enter(rank, r.launch) : now_;
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
      events_.at(begin, Step::kTake, static_cast<int>(units_.size()) - 1);
    }
  }
}

bool Simulation::take_task(Unit& unit) {
  SimulatedRank& r = simulated(unit.rank);
  if (unit.taken == unit.draw.count) {
    DrawnQueue& queue = (unit.in_comm ? r.comm : r.main)[static_cast<std::size_t>(r.launch)];
    if (queue.empty()) return false;
    unit.draw = queue.draw(r.view());
    unit.taken = 0;
  }
  unit.task = unit.draw.task(r.view(), unit.taken++);
  return true;
}

void Simulation::take(int index) {
  Unit& unit = units_[static_cast<std::size_t>(index)];
  if (!take_task(unit)) return retire(index);
  unit.begun = now_;
  unit.linked = 0;
  wait(index);
}

void Simulation::retire(int index) {
  Unit& unit = units_[static_cast<std::size_t>(index)];
  if (unit.finished) return;
  SimulatedRank& r = simulated(unit.rank);
  if (unit.in_comm) {
    if (--r.lanes_left[static_cast<std::size_t>(unit.worker)] == 0 && roles(r).join) {
      unit.in_comm = false;
      unit.last_pull = -1;
      return take(index);
    }
  }
  unit.finished = true;
  if (--r.active > 0) return;
  r.launch_ends.push_back(now_);
  events_.at(now_ + profile_.launch_s, Step::kLaunch, unit.rank);
}

/// When a unit that has waited since `begun` looks next, at or after `visible`.
double Simulation::seen_at(const Unit& unit, double visible) const {
  const WakeProfile& wake = profile_.wake;
  if (wake.first_sleep_s == 0 || visible <= unit.begun) return std::max(visible, now_);
  double look = unit.begun;
  double sleep = wake.first_sleep_s;
  for (; look < visible && sleep < wake.longest_sleep_s; sleep *= 2) {
    look += sleep + wake.sleep_slack_s;
  }
  // The others are all as long.
  const double longest = wake.longest_sleep_s + wake.sleep_slack_s;
  if (look < visible) look += longest * std::ceil((visible - look) / longest);
  return std::max(look, now_);
}

/// Nothing where the wait is over; else when it will be, or kNever where the unit was put in the
/// counter's list of waiters.
std::optional<double> Simulation::block(SimulatedRank& r, int index, const Wait& w) {
  const bool pushed = r.view().counter(w.kind).of == CounterOf::kTokenBlock;
  const bool of_peer = stand_in_ == StandIn::kOneRank && pushed && w.peer != r.view().rank;
  Counter& counter = of_peer ? r.mirrored : r.counters.at(w.kind, w.index, w.owner);
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
  SimulatedRank& r = simulated(unit.rank);
  std::optional<double> blocked;
  for_each_wait(r.view(), unit.task, [&](const Wait& w) {
    if (!blocked) blocked = block(r, index, w);
  });
  if (!blocked) return start(index);
  if (*blocked != kNever) events_.at(seen_at(unit, *blocked), Step::kWait, index);
}

void Simulation::start(int index) {
  Unit& unit = units_[static_cast<std::size_t>(index)];
  SimulatedRank& r = simulated(unit.rank);
  const PassView& v = r.view();
  const Task& task = unit.task;
  unit.ready = now_;
  if (v.stage(task.stage).side != StageSide::kPull) {
    unit.last_pull = -1;
    return compute(index);
  }
  // As Engine::wait_for_pulls: a worker asks for its next transfer while the last is under way.
  const double asked = unit.last_pull < 0 ? now_ : unit.last_pull;
  double done = asked;
  for (std::int64_t i = task.first_pull(); i < task.end_pull();) {
    const std::int64_t first = i;
    while (i < task.end_pull() && v.pulls[i].source == v.pulls[first].source) ++i;
    const auto bytes = static_cast<double>((i - first) * token_bytes(v, task.stage));
    const int from = here(r, v.pulls[first].source);
    done = std::max(
        done,
        network_.transfer(v.rank, from, v.rank, bytes, asked, profile_.link.pull_bytes_per_s).done);
  }
  unit.last_pull = done;
  unit.linked = woken(done) - now_;
  ++r.pulling;
  events_.at(woken(done), Step::kPulled, index);
}

/// When a worker that sleeps until `when` goes on.
double Simulation::woken(double when) const {
  return when > now_ ? when + profile_.wake.sleep_slack_s : now_;
}

void Simulation::compute(int index) {
  Unit& unit = units_[static_cast<std::size_t>(index)];
  SimulatedRank& r = simulated(unit.rank);
  const Task& task = unit.task;
  double work = r.costs.of(r.view(), task);
  if (r.view().stage(task.stage).kind == StageKind::kProduct && r.pulling > 0)
    work *= profile_.beside_link;
  cores_.start(index, work, now_);
}

std::size_t Simulation::push_depth() const {
  return static_cast<std::size_t>(profile_.push_depth >= 0 ? profile_.push_depth
                                                           : schedule_.push_depth);
}

/// The share of a tile's pushes that keeps its worker from going on. On a GPU all columns but the
/// last 128 leave through a pipeline slot, which the next tile's loads soon need back
/// (cuda/device/sm90/combine.cuh).
double Simulation::push_held() const {
  constexpr int kOwnColumns = 128;  // that leave through buffers of their own
  if (profile_.backend != Backend::kCuda || schedule_.tile_n <= kOwnColumns) return 0;
  return 1 - static_cast<double>(kOwnColumns) / schedule_.tile_n;
}

void Simulation::finish(int index) {
  Unit& unit = units_[static_cast<std::size_t>(index)];
  SimulatedRank& r = simulated(unit.rank);
  const Task& task = unit.task;
  if (r.view().stage(task.stage).side == StageSide::kPull) --r.pulling;
  unit.held = now_;
  signal(index, task);
  double free = unit.held;
  while (!unit.pushes.empty() && unit.pushes.front() <= now_) unit.pushes.pop_front();
  while (unit.pushes.size() > push_depth()) {
    free = std::max(free, unit.pushes.front());
    unit.pushes.pop_front();
  }
  free = woken(free);
  unit.released = free;
  note(r, unit, task);
  if (free > now_) return events_.at(free, Step::kPushed, index);
  take(index);
}

/// Prefetches where rows of a run's pulls are listed. They lie far apart: each would be waited for
/// after the other.
void prefetch_rows(const PassView& v, const Task& pulls) {
  for (std::int64_t i = pulls.m; i < pulls.m + pulls.n; ++i) {
    __builtin_prefetch(v.pull_rows + v.pulls[i].first_row);
  }
}

void Simulation::signal(int index, const Task& task) {
  Unit& unit = units_[static_cast<std::size_t>(index)];
  SimulatedRank& r = simulated(unit.rank);
  const PassView& v = r.view();
  if (v.stage(task.stage).side == StageSide::kPull) prefetch_rows(v, task);
  if (v.stage(task.stage).side == StageSide::kRail) return send_far(r, task);
  for_each_counter(v.stage(task.stage).signals, [&](CounterKind kind) {
    if (v.counter(kind).of == CounterOf::kTokenBlock) return push(unit, r, task);
    if (v.counter(kind).of == CounterOf::kPiece) return;  // pushed with the others
    for_each_signal(v, kind, task, [&](const Signal& s) {
      advance(r.counters.at(s.kind, s.index), s.amount, now_);
    });
  });
}

/// Rows of this rank are visible at once, those of others when the link has carried what was pushed
/// to them.
void Simulation::push(Unit& unit, SimulatedRank& r, const Task& task) {
  const int self = r.view().rank;
  const bool last_column = r.pushed.finish(task.m);
  const std::int64_t columns = r.pushed.columns(task.n);
  const std::int64_t element = r.view().stage(task.stage).wire.pushed_element;
  const auto runs = r.pushed.runs(task.m);
  if (last_column) {
    for (const PushedTiles::Run& run : runs) {
      if (here(r, run.rank) == self) arrive(r, run.rank, r.pushed.arrivals(run), now_);
    }
  }
  double first = now_, last = now_;
  bool remote = false;
  for (PushedTiles::Run& run : runs) {
    const int to = here(r, run.rank);
    const auto bytes = static_cast<double>(element * run.rows * columns);
    const auto [begun, done] = network_.transfer(self, self, to, bytes, now_, push_rate_);
    if (to == self) continue;
    if (!remote) first = begun;
    remote = true;
    last = std::max(last, done);
    run.visible = std::max(run.visible, done + profile_.wake.flag_s);
    if (last_column && stand_in_ != StandIn::kOneRank) {
      arrive(rank_at(to), run.rank, r.pushed.arrivals(run), run.visible);
    }
  }
  if (last > now_) {
    unit.pushes.push_back(last);
    const double share = push_held();
    if (share > 0) unit.held = std::max(now_, first + share * (last - first));
  }
  if (stand_in_ != StandIn::kOneRank) return;
  r.mirrored.visible = std::max(r.mirrored.visible, last + profile_.wake.flag_s);
  if (--r.pushes_left == 0) advance(r.mirrored, 1, r.mirrored.visible);
}

/// Counts at `peer` what was pushed for `rank`: itself, or one that it stands in for.
void Simulation::arrive(SimulatedRank& peer, int rank,
                        std::span<const PushedTiles::Arrival> arrivals, double visible) {
  for (const PushedTiles::Arrival& a : arrivals) {
    advance(peer.counters.at(a.kind, a.index, rank), a.elements, visible);
  }
}

/// Sends to the rank of the rail on the task's host, while the worker goes on.
void Simulation::send_far(SimulatedRank& r, const Task& task) {
  const PassView& v = r.view();
  const int own = index_of(v.rank);
  const int to = index_of(v.layout.relay(v.rank, task.host()));
  const Message message{.from = own,
                        .to = r.other_hosts ? own : to,
                        .task = task,
                        .bytes = static_cast<double>(move_size(v, task).bytes)};
  if (rails_.enabled()) return rails_.take({.message = rails_.add(message)}, now_, cores_);
  deliver(message, carry(message));
}

/// When the network has carried it.
double Simulation::carry(const Message& message) {
  const PassView& v = simulated(message.from).view();
  const int to = v.layout.relay(v.rank, message.task.host());
  return network_.transfer(v.rank, v.rank, to, message.bytes, now_).done;
}

void Simulation::finish_rail(int unit) {
  const RailThreads::Job job = rails_.finish(unit, now_, cores_);
  const Message message = rails_[job.message];
  if (job.comes) return deliver(message, now_);
  events_.at(carry(message), Step::kCame, job.message);
}

void Simulation::deliver(const Message& message, double visible) {
  SimulatedRank& r = simulated(message.from);
  const auto to_peer = [&](const Signal& s) { hear(s, visible + profile_.wake.flag_s); };
  r.other_hosts ? r.other_hosts->sent(message.task, to_peer)
                : for_each_signal(r.view(), message.task, to_peer);
}

/// Counts a signal from another host.
void Simulation::hear(const Signal& s, double visible) {
  advance(rank_at(s.rank).counters.at(s.kind, s.index), s.amount, visible);
}

/// Who has a rank's memory on this host: itself, or a relay.
int Simulation::here(const SimulatedRank& r, int rank) const {
  const RankLayout& layout = r.view().layout;
  return layout.relay(rank, layout.host_of(r.view().rank));
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
    events_.at(seen_at(unit, counter.visible), Step::kWait, index);
  }
}

void Simulation::note(SimulatedRank& r, const Unit& unit, const Task& task) {
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
                        .expert = task.expert < 0 ? -1 : v.global_expert(task.expert),
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
