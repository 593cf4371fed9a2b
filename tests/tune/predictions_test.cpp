// What the simulator says of a sample of passes, to the bit: whoever makes it faster, or takes it
// apart, learns from predictions.txt whether it still says the same. Where the model or the order
// of tasks is meant to change, the failure prints the line that belongs there.
#include <gtest/gtest.h>

#include <bit>
#include <cstdio>
#include <fstream>
#include <map>
#include <sstream>

#include "tune/cost_model.h"
#include "tune/plans_of_shape.h"

namespace uniep::tune {
namespace {

/// Everything that a pass comes to: a number that another pass is not likely to have.
class Digest {
 public:
  void add(std::uint64_t value) { sum_ = (sum_ ^ value) * 0x9e3779b97f4a7c15ULL + (sum_ >> 29); }
  void add(std::int64_t value) { add(static_cast<std::uint64_t>(value)); }
  void add(double value) { add(std::bit_cast<std::uint64_t>(value)); }
  std::uint64_t value() const { return sum_; }

 private:
  std::uint64_t sum_ = 0;
};

std::uint64_t digest(const SimulatedPass& pass) {
  Digest d;
  for (const PassStats& stats : pass.stats) {
    d.add(stats.elapsed_s);
    for (const StageStats& stage : stats.stages) {
      d.add(stage.tasks);
      for (const double seconds : {stage.busy_s, stage.wait_s, stage.link_s}) d.add(seconds);
    }
  }
  for (const auto& events : pass.timeline) {
    for (const TimelineEvent& e : events) {
      for (const std::int64_t v : {std::int64_t{e.worker}, std::int64_t{e.launch}, e.tile,
                                   e.begin_ns, e.ready_ns, e.link_ns, e.end_ns}) {
        d.add(v);
      }
    }
  }
  return d.value();
}

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
  std::string shape, machine, pass, schedule, seconds, digest;
  int ranks = 0, most_ranks = 0, ranks_per_node = 0;
  double skew = 0;

  friend std::istream& operator>>(std::istream& in, Sample& s) {
    return in >> s.shape >> s.ranks >> s.most_ranks >> s.ranks_per_node >> s.skew >> s.machine >>
           s.pass >> s.schedule >> s.seconds >> s.digest;
  }
};

const std::vector<RoutingPlan>& plans_of(const Sample& s) {
  static std::map<std::string, std::vector<RoutingPlan>> made;
  std::ostringstream key;
  key << s.shape << ' ' << s.ranks << ' ' << s.most_ranks << ' ' << s.skew;
  auto& plans = made[key.str()];
  if (plans.empty()) plans = testing::plans_of_shape(s.shape, s.ranks, s.skew, s.most_ranks);
  return plans;
}

/// Seconds and digest as the file has them.
std::string prediction(const Sample& s) {
  const MachineProfile machine = s.machine == "gpu" ? made_up_gpu() : made_up_cpu();
  SimulationOptions options{.topology = {s.ranks_per_node, 5e10}, .record_timeline = true};
  const Pass pass = s.pass == "forward" ? Pass::kForward : Pass::kBackward;
  const SimulatedPass simulated =
      simulate(plans_of(s), pass, parse_schedule(s.schedule), machine, options);
  char text[64];
  std::snprintf(text, sizeof text, "%a %016llx", simulated.seconds,
                static_cast<unsigned long long>(digest(simulated)));
  return text;
}

TEST(Predictions, AreThoseOnRecord) {
  std::ifstream file(UNIEP_PREDICTIONS);
  ASSERT_TRUE(file) << UNIEP_PREDICTIONS;
  std::string line;
  int count = 0;
  while (std::getline(file, line)) {
    Sample s;
    ASSERT_TRUE(std::istringstream(line) >> s) << line;
    const std::string first = s.seconds + ' ' + s.digest;
    const std::string now = prediction(s);
    EXPECT_EQ(now, first) << "the line that belongs there:\n"
                          << line.substr(0, line.size() - first.size()) << now;
    ++count;
  }
  EXPECT_EQ(count, 178);
}

}  // namespace
}  // namespace uniep::tune
