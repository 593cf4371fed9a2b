// The space that tuners walk: every point is allowed, stands for one pass only, and is found.
#include "schedule/space.h"

#include <gtest/gtest.h>

#include <set>

#include "base/check.h"
#include "schedule/axes.h"
#include "schedule/random_pass.h"
#include "schedule/roles.h"
#include "schedule/token_waves.h"
#include "support/cases.h"
#include "support/expect_error.h"
#include "support/ring_rows.h"

namespace uniep::testing {
namespace {

const Problem kProblem{
    .hidden = 64, .intermediate = 32, .num_experts = 8, .topk = 2, .max_tokens = 64};
const Place kCpu{};
const Place kGpu{.backend = Backend::kCuda, .max_workers = 132};

constexpr const char* kSmall =
    "launch=separate|pipelined|single,waves=1|2,workers=2,dispatch_workers=0|1,dispatch_join=yes,"
    "pull_tokens=16,dispatch_wire=dedup,tile_m=32|64,tile_n=64|128,expert_order=index,"
    "rotate=own-first,raster=along-m,band=0,lag=0|1,lag_tiles=0,head_start=0,mix_run=0,"
    "ready_rows=32|64,token_block=32,push_depth=0|64,wgrad=interleaved|after";

Space small(Pass pass) {
  Space space(kProblem, pass, kCpu);
  space.restrict_to(kSmall);
  return space;
}

TEST(Space, DefaultsAndPresetsArePointsOfIt) {
  for (const Place& place : {kCpu, kGpu}) {
    for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
      const Space space(kProblem, pass, place);
      const Schedule base = default_schedule(place.backend);
      for (const char* preset : {"sequential", "pipelined:2", "two-kernel", "single"}) {
        const Schedule s = space.canonical(parse_schedule(preset, base));
        EXPECT_TRUE(space.allows(s)) << name(place.backend) << ' ' << to_string(s);
      }
    }
  }
}

TEST(Space, EnumerationFindsEveryPassOnce) {
  for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
    const Space space = small(pass);
    std::set<std::string> seen;
    space.for_each([&](const Schedule& s) {
      EXPECT_TRUE(space.allows(s)) << to_string(s);
      EXPECT_EQ(space.canonical(s), s);
      EXPECT_TRUE(seen.insert(to_string(s)).second) << to_string(s);
    });
    EXPECT_EQ(static_cast<std::int64_t>(seen.size()), space.size());
    EXPECT_LT(static_cast<double>(seen.size()), space.combinations());
    Space::Rng rng(1);
    for (int i = 0; i < 500; ++i) {
      EXPECT_TRUE(seen.contains(to_string(space.sample(rng))));
    }
  }
}

TEST(Space, ARingOfRowsLeavesNoChoiceOfSomeAxes) {
  Problem ring = kProblem;
  ring.backward_rows = 128;
  Space space(ring, Pass::kBackward, kCpu);
  space.restrict_to(kSmall);
  space.restrict_to("dispatch_wire=dedup|rows");
  space.for_each([](const Schedule& s) {
    EXPECT_EQ(s.launch, LaunchGrouping::kSingle);
    EXPECT_EQ(s.waves, 1);
    EXPECT_EQ(s.dispatch_wire, DispatchWire::kRows);
    EXPECT_EQ(s.wgrad, WgradPlacement::kInterleaved);
  });
  // dispatch_workers x lag, times 3 of (tile_m, ready_rows), 2 of tile_n, 2 of push_depth, 2 of
  // wgrad_run.
  EXPECT_EQ(space.size(), 2 * 2 * 3 * 2 * 2 * 2);
}

/// Their number follows from that of hosts, which no candidate may be.
TEST(Space, TokensInWavesLeaveNoChoiceOfTheirNumber) {
  for (const Place& place : {kCpu, kGpu}) {
    for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
      for (const int hosts : {2, 3, 4, 5, 6, 8}) {
        Problem problem = kProblem;
        problem.max_tokens *= hosts;
        problem.gathered_hosts = hosts;
        problem.first_host = 0;
        Space space(problem, pass, place);
        space.restrict_to("waves=1,launch=single");
        const Schedule base = space.canonical(default_schedule_for(problem, place));
        EXPECT_TRUE(space.allows(base)) << to_string(base);
        EXPECT_EQ(base.launch, LaunchGrouping::kWaves);
        EXPECT_EQ(base.waves, num_token_waves(hosts, pass));
        EXPECT_GE(space.neighbours(base).size(), 10u);
        Space::Rng rng(1);
        EXPECT_EQ(space.sample(rng).waves, base.waves);
      }
    }
  }
}

TEST(Space, CountsOfASmallOneByHand) {
  // waves x dispatch_workers x lag: 2 x 1 x 1 of separate, where the latter two have no effect;
  // 1 x 2 x 2 of pipelined; 2 x 2 x 2 of single. Times 3 of (tile_m, ready_rows), 2 of tile_n, 2 of
  // push_depth, and in backward 2 of wgrad and 2 of wgrad_run.
  EXPECT_EQ(small(Pass::kForward).size(), (2 + 4 + 8) * 3 * 2 * 2);
  EXPECT_EQ(small(Pass::kBackward).size(), (2 + 4 + 8) * 3 * 2 * 2 * 2 * 2);
}

/// The points that another value on one axis makes of `s`: what else differs had no effect before,
/// or has none after. All candidates are tried, since the space allows but those that it kept.
std::multiset<std::string> one_axis_from(const Space& space, const Schedule& s) {
  std::set<std::string> found;
  for (std::size_t i = 0; i < schedule_axes().size(); ++i) {
    for (const int value : schedule_axes()[i].candidates) {
      Schedule moved = s;
      set_axis(moved, i, value);
      moved = space.canonical(moved);
      if (moved != s && space.allows(moved)) found.insert(to_string(moved));
    }
  }
  return {found.begin(), found.end()};
}

std::multiset<std::string> lines(const std::vector<Schedule>& schedules) {
  std::multiset<std::string> lines;
  for (const Schedule& s : schedules) lines.insert(to_string(s));
  return lines;
}

TEST(Space, AValueThatIsNamedTwiceCountsOnce) {
  Space once = small(Pass::kForward), twice = small(Pass::kForward);
  once.restrict_to("tile_n=64");
  twice.restrict_to("tile_n=64|64");
  EXPECT_EQ(twice.size(), once.size());
  std::set<std::string> seen;
  twice.for_each(
      [&](const Schedule& s) { EXPECT_TRUE(seen.insert(to_string(s)).second) << to_string(s); });
}

TEST(CpuWorkers, AreACoresEachAndTheDispatchersOnTop) {
  EXPECT_EQ(cpu_workers({.workers = 0, .dispatch_workers = 3}, 8, 2), 7);
  EXPECT_EQ(cpu_workers({.workers = 0, .dispatch_workers = 0}, 1, 4), 1);
  EXPECT_EQ(cpu_workers({.workers = 5, .dispatch_workers = 3}, 8, 2), 5);
}

TEST(Space, NeighboursDifferInOneAxisAndLeadEverywhere) {
  const Space space = small(Pass::kForward);
  std::set<std::string> reached;
  Space::Rng rng(4);
  std::vector<Schedule> todo{space.sample(rng)};
  while (!todo.empty()) {
    const Schedule s = todo.back();
    todo.pop_back();
    if (!reached.insert(to_string(s)).second) continue;
    const std::vector<Schedule> neighbours = space.neighbours(s);
    ASSERT_EQ(lines(neighbours), one_axis_from(space, s)) << to_string(s);
    todo.insert(todo.end(), neighbours.begin(), neighbours.end());
  }
  EXPECT_EQ(static_cast<std::int64_t>(reached.size()), space.size());
}

TEST(Space, NeighboursThatMeanTheSameAreOne) {
  Space space = small(Pass::kForward);
  space.restrict_to("pull_tokens=0|1|16");  // in batches as small as kProblem's, 0 is 1
  space.for_each([&](const Schedule& s) {
    EXPECT_EQ(lines(space.neighbours(s)), one_axis_from(space, s)) << to_string(s);
  });
}

TEST(Space, SamplesOfTheCudaBackendAreWhatItAccepts) {
  const Space space(kProblem, Pass::kBackward, kGpu);
  Space::Rng rng(2);
  for (int i = 0; i < cases(1000); ++i) {
    const Schedule s = space.sample(rng);
    EXPECT_EQ(backend_reason(s, kGpu), std::nullopt);
    EXPECT_EQ(s.push_depth, default_schedule(Backend::kCuda).push_depth) << "has no effect there";
  }
}

TEST(Space, SizesThatAreWhatTheyWouldBeAreLeftOpen) {
  Space space(kProblem, Pass::kForward, kGpu);  // of 64 tokens: pulls of 1, blocks of 1
  const Schedule open = space.canonical(default_schedule(Backend::kCuda));
  EXPECT_EQ(open.pull_tokens, 0);
  EXPECT_EQ(open.token_block, 0);
  const auto canonical = [&](const char* sizes) {
    return space.canonical(parse_schedule(sizes, open));
  };
  EXPECT_EQ(canonical("pull_tokens=1,token_block=1"), open);
  EXPECT_EQ(canonical("pull_tokens=2,token_block=1"), parse_schedule("pull_tokens=2", open));
  EXPECT_EQ(canonical("pull_tokens=1,token_block=8"), parse_schedule("token_block=8", open));
  space.restrict_to("pull_tokens=1|8");
  EXPECT_EQ(canonical("pull_tokens=1").pull_tokens, 1) << "0 is not to be tried";
}

TEST(Space, ARunOfWeightTilesIsLeftOpenWhereItIsWhatItWouldBe) {
  const Space space(kProblem, Pass::kBackward, kGpu);  // few tiles, one at a time
  const Schedule open = space.canonical(default_schedule(Backend::kCuda));
  EXPECT_EQ(open.wgrad_run, 0);
  EXPECT_EQ(space.canonical(parse_schedule("wgrad_run=1", open)), open);
  EXPECT_EQ(space.canonical(parse_schedule("wgrad_run=4", open)).wgrad_run, 4);
}

TEST(Space, RefusesWhatItDoesNotKnow) {
  Space space(kProblem, Pass::kForward, kCpu);
  expect_invalid("the space has no axis 'tile_k'; uniep info lists them",
                 [&] { space.restrict_to("tile_k=3"); });
  expect_invalid("schedule axis tile_m is 48; 16 to 128, a power of two, is accepted",
                 [&] { space.restrict_to("tile_m=64|48"); });
  space.restrict_to("launch=pipelined,waves=1");
  Space::Rng rng(3);
  expect_invalid(
      "the space has no point that the constraints allow; one with wider axes is accepted",
      [&] { space.sample(rng); });
}

/// All that a pass does: who begins with dispatch, and each launch's tasks in order, with what they
/// wait for and signal.
std::string work(const PassView& v) {
  const int workers = cpu_workers(v.schedule, 8, v.num_ranks);
  std::string text = cat(workers, " workers\n");
  const auto add = [&](const TrackList& queue) {
    for (const Task& t : tasks_of(v, queue)) {
      text += cat(name(t.stage), ' ', t.m, ' ', t.n, ':');
      for_each_wait(v, t, [&](const Wait& w) {
        text += cat(' ', static_cast<int>(w.kind), ',', w.index, ',', w.expected);
      });
      for_each_signal(v, t, [&](const Signal& s) {
        text += cat(' ', static_cast<int>(s.kind), ',', s.rank, ',', s.index, ',', s.amount);
      });
      text += '\n';
    }
  };
  for (int i = 0; i < num_launches(v); ++i) {
    const Launch launch = launch_at(v, i);
    const Roles roles = launch_roles(v, launch, workers);
    const bool parts = launch.main.count > 0 && roles.dispatchers > 0 && !roles.join;
    text += cat(roles.dispatchers, parts ? " dispatchers\n" : " dispatch first\n", "comm\n");
    add(launch.comm);
    text += "main\n";
    add(launch.main);
  }
  return text;
}

TEST(Space, AxesWithoutEffectLeaveEveryTaskAsItIs) {
  for (int seed = 1; seed <= cases(300); ++seed) {
    RandomPass p = random_pass(static_cast<unsigned>(seed), 30);
    if (seed % 7 == 0) p.schedule.workers = 0;
    if (seed % 3 == 0 && p.pass == Pass::kBackward && p.part == PassPart::kWhole) {
      p.routing.problem.backward_rows =
          ring_rows(p.routing.ids, p.routing.problem.num_experts, p.routing.problem.row_align, 1);
    }
    build_orders(p);
    const Space space(p.routing.problem, p.pass, kCpu);
    const std::string before = work(p.view(0));
    const Schedule original = p.schedule;
    p.schedule = space.canonical(p.schedule);
    build_orders(p);
    EXPECT_EQ(work(p.view(0)), before) << to_string(original) << '\n' << to_string(p.schedule);
  }
}

TEST(Constraints, EachRefusesAndSaysWhatIsAccepted) {
  const auto reason = [](std::string_view text, const Place& place) {
    return invalid_reason(parse_schedule(text, default_schedule(place.backend)), kProblem, place);
  };
  EXPECT_EQ(reason("single", kCpu), std::nullopt);
  EXPECT_EQ(reason("single", kGpu), std::nullopt);
  EXPECT_STATES(reason("launch=pipelined", kGpu).value_or(""),
                "launch=pipelined needs at least 2 waves, for there is nothing to overlap in one");
  EXPECT_STATES(reason("tile_m=64", kGpu).value_or(""),
                "the schedule has tile_m=64,tile_n=256; the CUDA backend accepts tile_m=128 with "
                "tile_n=128 or 256, such as default_schedule(Backend::kCuda) has");
  EXPECT_NE(reason("tile_n=64", kGpu), std::nullopt);
  EXPECT_STATES(reason("dispatch_workers=0", kGpu).value_or(""),
                "the schedule has dispatch_workers=0; the CUDA backend accepts 1 or more");
  EXPECT_EQ(reason("sequential,dispatch_workers=0", kGpu), std::nullopt);
  EXPECT_STATES(
      reason("workers=133", kGpu).value_or(""),
      "the schedule has workers=133; this device accepts 0 to 132, the SMs that a pass may hold");
  EXPECT_EQ(reason("workers=132", kGpu), std::nullopt);
  EXPECT_EQ(reason("workers=133,tile_m=16,dispatch_workers=0", kCpu), std::nullopt);
}

TEST(Constraints, HaveAReasonEach) {
  EXPECT_EQ(schedule_constraints().size(), constraints().size());
  for (const ConstraintInfo& c : schedule_constraints()) {
    EXPECT_FALSE(c.rule.empty());
    EXPECT_FALSE(c.reason.empty()) << c.rule;
  }
}

}  // namespace
}  // namespace uniep::testing
