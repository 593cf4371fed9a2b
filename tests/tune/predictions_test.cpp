// What must hold of every prediction, on a sample of passes with two made-up machines: the same
// bits in every run and on every thread, time in proportion to what tasks and transfers cost, no
// less than the work takes. Beside that predictions.txt has what the model said when a pass was
// added, to three digits; whoever changes the model on purpose by more than the tolerance writes
// the new figure there. measured_test.cpp compares with machines that exist.
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <sstream>
#include <thread>

#include "tune/model/cost_model.h"
#include "tune/plans_of_shape.h"

namespace uniep::tune {
namespace {

constexpr double kTolerance = 0.05;  // of what is on record
/// Tasks that take less time may meet a worse order, and a pass then takes longer.
constexpr double kWorseOrder = 0.02;

std::vector<GemmCost> products(double rate) {
  std::vector<GemmCost> costs;
  for (const Stage stage :
       {Stage::kFc1, Stage::kFc2, Stage::kDfc2, Stage::kDfc1, Stage::kWgrad2, Stage::kWgrad1}) {
    const double slower = 1 + 0.03 * static_cast<double>(costs.size());
    costs.push_back({stage, 0, 3e-7, slower / rate, 1e-12, 2e-12, 7e-11});
  }
  return costs;
}

MachineProfile made_up_gpu() {
  MachineProfile p;
  p.name = "gpu";
  p.backend = Backend::kCuda;
  p.workers = 132;
  p.lanes = 12;
  p.push_depth = 1;
  p.padding = 1;
  p.k_step = 64;
  p.cache_bytes = 5e7;
  p.gemms = products(2.6e12);
  p.dispatch = {2e-6, 1e-8, 2.9e-10};
  p.reduce = {2e-6, 0, 4.3e-11};
  p.enter = {1.9e-5, 0, 8e-13};
  p.launch_s = 5e-6;
  p.draw_s = 3.5e-6;
  p.beside_link = 1.18;
  p.link.bytes_per_s = 3.4e11;
  p.link.latency_s = 1.3e-6;
  p.link.pull_bytes_per_s = 2.95e11;
  p.link.push.points = {{128, 2.7e11}, {256, 3.26e11}, {512, 3.4e11}};
  p.wake.flag_s = 1.3e-6;
  return p;
}

MachineProfile made_up_cpu() {
  MachineProfile p;
  p.name = "cpu";
  p.cores = 2;
  p.gemms = products(4e10);
  p.dispatch = {1e-6, 5e-8, 1.1e-10};
  p.reduce = {1e-6, 2e-7, 2.3e-10};
  p.enter = {4e-5, 0, 1e-10};
  p.launch_s = 2e-5;
  p.link.bytes_per_s = 1e9;
  p.link.latency_s = 1e-6;
  p.link.exclusive = true;
  p.wake = {1e-7, 2e-5, 2e-4, 7e-5};
  return p;
}

struct Sample {
  std::string shape, machine, pass, schedule;
  int ranks = 0, most_ranks = 0, ranks_per_node = 0;
  double skew = 0, recorded_ms = 0;
  std::string line;

  friend std::istream& operator>>(std::istream& in, Sample& s) {
    return in >> s.shape >> s.ranks >> s.most_ranks >> s.ranks_per_node >> s.skew >> s.machine >>
           s.pass >> s.schedule >> s.recorded_ms;
  }
};

std::vector<Sample> read_samples() {
  std::ifstream file(UNIEP_PREDICTIONS);
  std::vector<Sample> samples;
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with('#')) continue;
    Sample s;
    EXPECT_TRUE(std::istringstream(line) >> s) << line;
    s.line = line;
    samples.push_back(s);
  }
  EXPECT_GE(samples.size(), 30u) << UNIEP_PREDICTIONS;
  return samples;
}

const std::vector<Sample>& samples() {
  static const std::vector<Sample> all = read_samples();
  return all;
}

const std::vector<RoutingPlan>& plans_of(const Sample& s) {
  static std::map<std::string, std::vector<RoutingPlan>> made;
  std::ostringstream key;
  key << s.shape << ' ' << s.ranks << ' ' << s.most_ranks << ' ' << s.skew;
  auto& plans = made[key.str()];
  if (plans.empty()) plans = uniep::testing::plans_of_shape(s.shape, s.ranks, s.skew, s.most_ranks);
  return plans;
}

MachineProfile machine_of(const Sample& s) {
  return s.machine == "gpu" ? made_up_gpu() : made_up_cpu();
}

constexpr Topology kNics{.nic_bytes_per_s = 5e10, .nic_latency_s = 5e-6};

Topology slower(Topology nics, double factor) {
  nics.nic_bytes_per_s /= factor;
  nics.nic_latency_s *= factor;
  return nics;
}

SimulatedPass simulated(const Sample& s, const std::vector<RoutingPlan>& plans,
                        const MachineProfile& machine, Topology nics = kNics) {
  nics.ranks_per_node = s.ranks_per_node;
  const SimulationOptions options{.topology = nics, .record_timeline = true};
  const Pass pass = s.pass == "forward" ? Pass::kForward : Pass::kBackward;
  return simulate(plans, pass, parse_schedule(s.schedule), machine, options);
}

SimulatedPass simulated(const Sample& s) { return simulated(s, plans_of(s), machine_of(s)); }

/// Everything that a pass comes to, in order.
std::vector<double> figures(const SimulatedPass& pass) {
  std::vector<double> all{pass.seconds};
  for (const PassStats& stats : pass.stats) {
    all.push_back(stats.elapsed_s);
    for (const StageStats& stage : stats.stages) {
      all.insert(all.end(),
                 {static_cast<double>(stage.tasks), stage.busy_s, stage.wait_s, stage.link_s});
    }
  }
  for (const auto& events : pass.timeline) {
    for (const TimelineEvent& e : events) {
      for (const std::int64_t v : {std::int64_t{e.worker}, std::int64_t{e.launch}, e.tile,
                                   e.begin_ns, e.ready_ns, e.link_ns, e.end_ns}) {
        all.push_back(static_cast<double>(v));
      }
    }
  }
  return all;
}

/// A machine on which everything takes `factor` times as long.
MachineProfile slower(MachineProfile p, double factor) {
  for (GemmCost& cost : p.gemms) {
    for (double* s : {&cost.fixed, &cost.per_mnk, &cost.per_mk, &cost.per_nk, &cost.per_mn}) {
      *s *= factor;
    }
  }
  for (MoveCost* cost : {&p.dispatch, &p.reduce, &p.enter}) {
    for (double* s : {&cost->fixed, &cost->per_item, &cost->per_byte}) *s *= factor;
  }
  for (double* s : {&p.launch_s, &p.draw_s, &p.link.latency_s, &p.wake.flag_s,
                    &p.wake.first_sleep_s, &p.wake.longest_sleep_s, &p.wake.sleep_slack_s}) {
    *s *= factor;
  }
  p.link.bytes_per_s /= factor;
  p.link.pull_bytes_per_s /= factor;
  for (auto& [bytes, rate] : p.link.push.points) rate /= factor;
  return p;
}

TEST(Predictions, AreWithinFivePercentOfThoseOnRecord) {
  for (const Sample& s : samples()) {
    const double ms = 1e3 * simulated(s).seconds;
    EXPECT_NEAR(ms, s.recorded_ms, kTolerance * s.recorded_ms) << s.line;
  }
}

TEST(Predictions, HaveTheSameBitsInEveryRunAndOnEveryThread) {
  std::vector<std::vector<double>> first;
  std::vector<const std::vector<RoutingPlan>*> plans;
  for (const Sample& s : samples()) {
    plans.push_back(&plans_of(s));
    first.push_back(figures(simulated(s)));
  }
  constexpr std::size_t kThreads = 4;
  std::vector<int> differing(kThreads, 0);
  {
    std::vector<std::jthread> threads;
    for (std::size_t t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, t] {  // each in an order of its own
        for (std::size_t i = 0; i < first.size(); ++i) {
          const std::size_t at = (i + t * first.size() / kThreads) % first.size();
          const Sample& s = samples()[at];
          differing[t] += figures(simulated(s, *plans[at], machine_of(s))) != first[at] ? 1 : 0;
        }
      });
    }
  }
  EXPECT_EQ(differing, std::vector<int>(kThreads, 0));
}

/// Of a power of two, which rounds nothing: so no time in the simulator is anything but a sum of
/// what the profile says.
TEST(Predictions, TakeTwiceAsLongWhereEverythingDoes) {
  for (const Sample& s : samples()) {
    const double slow =
        simulated(s, plans_of(s), slower(machine_of(s), 2), slower(kNics, 2)).seconds;
    EXPECT_DOUBLE_EQ(slow, 2 * simulated(s).seconds) << s.line;
  }
}

TEST(Predictions, AreNoShorterWithLongerProductsNorLongerThanInProportion) {
  for (const Sample& s : samples()) {
    MachineProfile machine = machine_of(s);
    machine.gemms = slower(machine, 1.5).gemms;
    const double before = simulated(s).seconds;
    const double now = simulated(s, plans_of(s), machine).seconds;
    EXPECT_GE(now, (1 - kWorseOrder) * before) << s.line;
    EXPECT_LE(now, (1 + kWorseOrder) * 1.5 * before) << s.line;
  }
}

TEST(Predictions, AreNoShorterOverASlowerWire) {
  for (const Sample& s : samples()) {
    MachineProfile machine = machine_of(s);
    machine.link = slower(machine, 4).link;
    const double before = simulated(s).seconds;
    const double now = simulated(s, plans_of(s), machine, slower(kNics, 4)).seconds;
    EXPECT_GE(now, (1 - kWorseOrder) * before) << s.line;
    EXPECT_LE(now, (1 + kWorseOrder) * 4 * before) << s.line;
  }
}

/// Seconds that the products of a rank's rows take on one worker, of whole tiles and nothing else.
double product_seconds(const Sample& s, const RoutingPlan& plan, const MachineProfile& machine) {
  const double weights = 3.0 * static_cast<double>(plan.problem().hidden) *
                         static_cast<double>(plan.problem().intermediate);
  const double passes = s.pass == "forward" ? 1 : 2;  // dx and dw
  double least = machine.gemms.front().per_mnk;
  for (const GemmCost& cost : machine.gemms) least = std::min(least, cost.per_mnk);
  return least * passes * weights * static_cast<double>(plan.traffic().rows);
}

/// A pass lasts as long as its slowest rank, in which no worker does two things at a time; and it
/// leaves no product out.
TEST(Predictions, LeaveRoomForAllWork) {
  for (const Sample& s : samples()) {
    const MachineProfile machine = machine_of(s);
    const SimulatedPass pass = simulated(s);
    double slowest = 0;
    for (std::size_t r = 0; r < pass.stats.size(); ++r) {
      const PassStats& stats = pass.stats[r];
      double busy = 0;
      for (const StageStats& stage : stats.stages) busy += stage.busy_s;
      EXPECT_GE(busy, product_seconds(s, plans_of(s)[r], machine)) << s.line;
      EXPECT_LE(busy, (1 + 1e-9) * pass.seconds * stats.workers * std::max(1, machine.lanes))
          << s.line;
      slowest = std::max(slowest, stats.elapsed_s);
    }
    EXPECT_DOUBLE_EQ(slowest, pass.seconds) << s.line;
  }
}

}  // namespace
}  // namespace uniep::tune
