// Profiles from timelines: a lab whose machine is simulated, with a profile that is known, must be
// found to have that profile.
#include "tune/lab/lab_profile.h"

#include <gtest/gtest.h>

#include <map>
#include <tuple>

#include "schedule/queue.h"
#include "schedule/random_pass.h"
#include "support/cases.h"
#include "tune/lab/timeline_samples.h"
#include "tune/model/cost_model.h"
#include "tune/plans_of_shape.h"

namespace uniep::testing {
namespace {

using namespace tune;

/// Rank 0 of a group whose passes take what a profile says, but each layer's first under a schedule
/// much longer. Where it is disturbed, the tasks of one of any three passes take twice as long.
class SimulatedLab final : public ProfileLab {
 public:
  SimulatedLab(const MachineProfile& machine, int ranks, bool disturbed = false)
      : machine_(machine), ranks_(ranks), disturbed_(disturbed) {}

  int ranks() const override { return ranks_; }

  void set_up(const std::string& shape, bool together) override {
    plans_ = plans_of_shape(shape, together ? ranks_ : 1);
    ++layers_;
  }

  const PlanData& plan() const override { return plans_[0].data(); }

  LabPass run(Pass pass, const Schedule& schedule, int busy_passes) override {
    const SimulationOptions options{.topology = {}, .record_timeline = true};
    SimulatedPass simulated = simulate(plans_, pass, schedule, machine_, options);
    const auto& tokens = plan();
    const double bytes = static_cast<double>(tokens.tokens() * 2 * tokens.problem.hidden);
    const auto [last, first] = busy_before_last_.try_emplace({layers_, pass, to_string(schedule)});
    last->second = busy_passes * simulated.seconds;
    // Where two passes come before those that are timed, this is the first of these.
    const int number = passes_[{layers_, pass, to_string(schedule)}]++;
    if (disturbed_ && number % 3 == 2) slow_down(simulated.timeline[0]);
    return {.elapsed_s = simulated.seconds + (first ? 0.1 : 0),
            .enter_s = machine_.enter.fixed + machine_.enter.per_byte * bytes,
            .workers = simulated.stats[0].workers,
            .events = std::move(simulated.timeline[0])};
  }

  std::vector<double> gather(double own) override { return {own}; }

  /// Of all layers, passes and schedules, the least time at work ahead of the last that was run.
  double least_busy_s() const {
    const auto least = std::ranges::min_element(busy_before_last_, {},
                                                [](const auto& busy) { return busy.second; });
    return least->second;
  }

 private:
  using PassOfLayer = std::tuple<int, Pass, std::string>;

  static void slow_down(std::vector<TimelineEvent>& events) {
    for (TimelineEvent& e : events) {
      for (std::int64_t* ns : {&e.begin_ns, &e.ready_ns, &e.link_ns, &e.end_ns}) *ns *= 2;
    }
  }

  const MachineProfile machine_;
  const int ranks_;
  const bool disturbed_;
  std::vector<RoutingPlan> plans_;
  int layers_ = 0;
  std::map<PassOfLayer, double> busy_before_last_;
  std::map<PassOfLayer, int> passes_;
};

MeasuredProfile profile_of_simulated(const MachineProfile& machine, int ranks,
                                     bool disturbed = false) {
  SimulatedLab lab(machine, ranks, disturbed);
  MachineProfile known = machine;
  known.gemms.clear();
  known.padding = 0;
  known.dispatch = known.reduce = known.enter = {};
  known.launch_s = 0;
  known.workers = 0;
  if (ranks > 1) {
    known.link = {};
    known.wake.flag_s = 0;
    known.beside_link = 1;
  }
  return measure_lab_profile(
      lab, known, {.repeats = disturbed ? 3 : 1, .busy_s = 0, .busy_passes = 0, .progress = [] {}});
}

void expect_near(double found, double truth, double error, const std::string& what) {
  EXPECT_NEAR(found, truth, error * truth) << what;
}

void expect_same_tasks(const MachineProfile& found, const MachineProfile& truth) {
  EXPECT_NEAR(found.padding, truth.padding, 0.051);
  ASSERT_EQ(found.gemms.size(), truth.gemms.size());
  for (const GemmCost& cost : truth.gemms) {
    const auto same = std::ranges::find_if(found.gemms, [&](const GemmCost& other) {
      return other.stage == cost.stage && other.tile_n == cost.tile_n;
    });
    ASSERT_NE(same, found.gemms.end());
    for (const double k : {1024.0, 4096.0}) {
      expect_near(same->per_mnk * k + same->per_mn, cost.per_mnk * k + cost.per_mn, 0.02,
                  cat(name(cost.stage), ", tile_n=", cost.tile_n, ", k=", k));
    }
  }
  const auto of = [](const MoveCost& cost, double bytes) {
    return cost.fixed + 8 * cost.per_item + cost.per_byte * bytes;
  };
  for (const double bytes : {1e5, 4e5}) {
    expect_near(of(found.dispatch, bytes), of(truth.dispatch, bytes), 0.02, "dispatch");
    expect_near(of(found.reduce, bytes), of(truth.reduce, bytes), 0.02, "reduce");
  }
  expect_near(found.enter.fixed + 1e7 * found.enter.per_byte,
              truth.enter.fixed + 1e7 * truth.enter.per_byte, 0.01, "enter");
  expect_near(found.launch_s, truth.launch_s, 0.05, "launch");
  EXPECT_EQ(found.workers, truth.workers);
}

TEST(LabProfile, FindsTheTasksOfASimulatedMachine) {
  const MachineProfile h200 = shipped_profile("h200");
  const MeasuredProfile found = profile_of_simulated(h200, 1);
  expect_same_tasks(found.profile, h200);
  // What one rank cannot measure stays.
  EXPECT_EQ(found.profile.link, h200.link);
  EXPECT_EQ(found.profile.wake, h200.wake);
  EXPECT_EQ(found.profile.beside_link, h200.beside_link);
  EXPECT_TRUE(found.link.empty());
  for (const FitReport& fit : found.fits) {
    EXPECT_LT(fit.mean_error, 0.02) << fit.what;
    EXPECT_LE(fit.mean_error, fit.worst_error) << fit.what;
    EXPECT_GT(fit.samples, 0u) << fit.what;
  }
}

TEST(LabProfile, OneDisturbedPassOfThreeDoesNoHarm) {
  const MachineProfile h200 = shipped_profile("h200");
  expect_same_tasks(profile_of_simulated(h200, 1, true).profile, h200);
}

TEST(LabProfile, KeepsTheMachineAtWorkAheadOfWhatIsTimed) {
  SimulatedLab lab(shipped_profile("h200"), 1);
  measure_lab_profile(lab, shipped_profile("h200"), {.repeats = 1, .busy_s = 0.3});
  EXPECT_GT(lab.least_busy_s(), 0.25);
}

TEST(LabProfile, FindsTheLinkOfASimulatedGroup) {
  const MachineProfile h200 = shipped_profile("h200");
  for (const int ranks : {2, 4}) {
    const MeasuredProfile found = profile_of_simulated(h200, ranks);
    const std::string group = cat(ranks, " ranks");
    expect_same_tasks(found.profile, h200);
    expect_near(found.profile.link.pull_bytes_per_s, h200.link.pull_bytes_per_s, 0.03, group);
    expect_near(found.profile.link.bytes_per_s, h200.link.bytes_per_s, 0.03, group);
    ASSERT_EQ(found.profile.link.push.points.size(), 3u);
    // Tiles of own rows, short as they are, leave the link idle.
    for (const Curve::Point& p : found.profile.link.push.points) {
      expect_near(p.value, h200.link.push(p.at), 0.07, cat(group, ", ", p.at, " bytes"));
    }
    expect_near(found.profile.wake.flag_s + found.profile.link.latency_s,
                h200.wake.flag_s + h200.link.latency_s, 0.1, group);
    EXPECT_EQ(found.profile.link.latency_s, found.profile.wake.flag_s) << group;
    expect_near(found.profile.beside_link, h200.beside_link, 0.02, group);
  }
}

TEST(LabProfile, FindsAnotherMachine) {
  MachineProfile other = shipped_profile("h200");
  other.padding = 0.8;
  for (GemmCost& cost : other.gemms) {
    cost.per_mnk *= cost.tile_n == 128 ? 1.3 : 0.7;
    cost.per_mn = 3e-11;
  }
  other.dispatch = {1e-6, 1e-7, 5e-10};
  other.reduce = {5e-6, 0, 2e-11};
  other.enter = {1e-5, 0, 2e-12};
  other.launch_s = 9e-6;
  expect_same_tasks(profile_of_simulated(other, 1).profile, other);
}

TEST(TimelineSamples, TasksAreToldByTheirNumbers) {
  for (int seed = 1; seed <= cases(300); ++seed) {
    const RandomPass p = random_pass(static_cast<unsigned>(seed), 60);
    SCOPED_TRACE(describe(static_cast<unsigned>(seed), p));
    for (int r = 0; r < p.ranks(); ++r) {
      const PassView& v = p.view(r);
      for (int i = 0; i < num_launches(v); ++i) {
        const Launch launch = launch_at(v, i);
        for (const TrackList& tracks : {launch.comm, launch.main}) {
          for (const Task& task : tasks_of(v, tracks)) {
            const Task again = task_numbered(v, task.stage, task.tile);
            ASSERT_EQ(again.expert, task.expert) << name(task.stage) << ' ' << task.tile;
            ASSERT_EQ(again.m, task.m) << name(task.stage) << ' ' << task.tile;
            ASSERT_EQ(again.n, task.n) << name(task.stage) << ' ' << task.tile;
          }
        }
      }
    }
  }
}

TEST(TimelineSamples, TurnsAndGapsFollowFromEnds) {
  const Problem problem{
      .hidden = 64, .intermediate = 64, .num_experts = 1, .topk = 1, .max_tokens = 256};
  const std::vector<std::int32_t> ids(256, 0);
  const std::vector<std::int64_t> tokens = {256};
  const RoutingPlan plan = RoutingPlan::build(problem, 0, tokens, ids);
  const PassOrder order(plan.data(), Pass::kForward, parse_schedule("sequential"));
  const auto event = [](int worker, int launch, Stage stage, std::int64_t tile, std::int64_t begin,
                        std::int64_t ready, std::int64_t end) {
    TimelineEvent e;
    e.worker = worker;
    e.launch = launch;
    e.stage = stage;
    e.tile = tile;
    e.begin_ns = begin;
    e.ready_ns = ready;
    e.end_ns = end;
    return e;
  };
  const std::vector<TimelineEvent> events = {
      event(1, 1, Stage::kFc1, 2, 110, 130, 170), event(0, 1, Stage::kFc1, 0, 100, 105, 200),
      event(0, 1, Stage::kFc1, 1, 200, 230, 300), event(0, 2, Stage::kFc2, 0, 350, 350, 400)};
  const auto samples = task_samples(order.view(), Stage::kFc1, events);
  ASSERT_EQ(samples.size(), 3u);
  EXPECT_EQ(samples[0].turn, 0);
  EXPECT_EQ(samples[1].turn, 0);
  EXPECT_DOUBLE_EQ(samples[2].turn, 100e-9);
  EXPECT_DOUBLE_EQ(samples[2].busy, 70e-9);
  const auto gaps = launch_gaps(events);
  ASSERT_EQ(gaps.size(), 1u);
  EXPECT_DOUBLE_EQ(gaps[0], 50e-9);
  EXPECT_DOUBLE_EQ(stage_span(Stage::kFc1, events).seconds, 200e-9);
  EXPECT_EQ(stage_span(Stage::kReduce, events).seconds, 0);
}

}  // namespace
}  // namespace uniep::testing
