// CPU ranks as processes, which tests start by fork: the bits of threads, several groups at a time,
// and ranks that leave, throw, are killed and are stopped.
#include "group/process_group.h"

#include <dirent.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <iostream>
#include <limits>
#include <list>
#include <set>
#include <stdexcept>

#include "layer/arguments.h"
#include "reference/contract.h"
#include "support/cases.h"
#include "support/expect_same.h"
#include "support/layer_group.h"
#include "support/process_group.h"
#include "support/run_layer.h"
#include "support/states.h"

namespace uniep::testing {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

/// A wait that ends for another reason than its limit ends long before.
constexpr int kLongLimitMs = 60000;
constexpr double kSoonSeconds = 15;

/// This rank's part of a global result, poisoned; the other parts are there.
LayerResult without_own_part(const workload::Split& split, int rank, const LayerResult& want) {
  LayerResult result = want;
  constexpr bf16 kNan{0x7fff};
  std::ranges::fill(split.forward_args(rank, result).out, kNan);
  const BackwardArgs args = split.backward_args(rank, result);
  std::ranges::fill(args.dx, kNan);
  std::ranges::fill(args.dprobs, std::numeric_limits<float>::quiet_NaN());
  for (const WeightGrad& grad : {args.dw1, args.dw2}) {
    std::ranges::fill(std::get<ExpertMatrices<bf16>>(grad).tensor(), kNan);
  }
  return result;
}

struct StepSchedules {
  Schedule forward{};
  Schedule backward{};
};

/// A whole step gives this rank's part of the contract.
void expect_step(Layer& layer, const workload::Split& split, int rank, const LayerResult& want,
                 const StepSchedules& schedules, const std::string& what) {
  LayerResult result = without_own_part(split, rank, want);
  const RoutingPlan plan = layer.plan(split.topk_ids(rank));
  const Saved saved = layer.forward(plan, split.forward_args(rank, result), schedules.forward);
  layer.backward(saved, split.backward_args(rank, result), schedules.backward);
  expect_same_bits(result, want, what);
}

/// What lies in /dev/shm under a name of ours, where nothing must ever be.
std::set<std::string> shared_files() {
  std::set<std::string> names;
  DIR* folder = opendir("/dev/shm");
  if (folder == nullptr) return names;
  while (const dirent* entry = readdir(folder)) {
    const std::string name = entry->d_name;
    if (name.find("uniep") != std::string::npos) names.insert(name);
  }
  closedir(folder);
  return names;
}

void expect_all_fine(Crew& crew) {
  for (const Crew::End& end : crew.ends()) {
    EXPECT_EQ(end.said, "fine");
    EXPECT_EQ(end.exit_code, 0);
    EXPECT_EQ(end.signal, 0);
  }
}

// ---- The same bits

class ProcessRanks : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(R, ProcessRanks, ::testing::Values(1, 2, 4, 8));

TEST_P(ProcessRanks, GiveTheBitsOfThreadsUnderAnySchedules) {
  const int ranks = GetParam();
  const auto before = shared_files();
  const int count = cases(6);
  for (unsigned seed = 1; seed <= static_cast<unsigned>(count); ++seed) {
    Rng rng(1000u * static_cast<unsigned>(ranks) + seed);
    const LayerData data = random_layer(rng, ranks);
    const auto begin = random_parts(rng, data.tokens, ranks);
    const workload::Split split(data, begin);
    std::vector<StepSchedules> steps;
    for (int i = 0; i < 4; ++i) {
      steps.push_back({random_schedule(rng, {}, 3), random_schedule(rng, {}, 3)});
    }
    const std::string link = chance(rng, 30) ? "0.05" : "";
    const LayerResult want = reference::contract(data);
    const Common<MeetingPlace> place;
    Crew crew(ranks, [&](int rank) {
      setenv("UNIEP_CPU_LINK_GBPS", link.c_str(), 1);
      const Communicator member = Communicator::from_callbacks(place->options(rank, ranks));
      EXPECT_EQ(member.rank(), rank);
      EXPECT_EQ(member.size(), ranks);
      EXPECT_EQ(member.backend(), Backend::kCpu);
      Layer layer(
          split.problem(), member,
          {.fault_injection = {.max_delay_us = static_cast<int>(seed % 2) * 300, .seed = seed}});
      for (std::size_t i = 0; i < steps.size(); ++i) {
        expect_step(layer, split, rank, want, steps[i],
                    cat("seed ", seed, ", step ", i, ", ", to_string(steps[i].forward), "; ",
                        to_string(steps[i].backward)));
      }
      return std::string("fine");
    });
    expect_all_fine(crew);
    // Threads, in a process of their own so that this one stays without any.
    Crew threads(1, [&](int) {
      RunOptions options;
      options.token_begin = begin;
      options.forward_schedule = steps[0].forward;
      options.backward_schedule = steps[0].backward;
      expect_same_bits(run_layer(data, options), want, cat("threads, seed ", seed));
      return std::string("fine");
    });
    expect_all_fine(threads);
  }
  EXPECT_EQ(shared_files(), before);
}

TEST(ProcessGroup, OneProcessIsInManyGroupsAtATime) {
  constexpr int kWorld = 4;
  // A world, its halves, and pairs across them; in the last group the ranks stand the other way.
  const std::vector<std::vector<int>> groups = {{0, 1, 2, 3}, {0, 1}, {2, 3},
                                                {0, 2},       {1, 3}, {3, 0}};
  std::vector<LayerData> data;
  std::vector<LayerResult> want;
  for (const auto& members : groups) {
    data.push_back(plain_layer(static_cast<int>(members.size())));
    want.push_back(reference::contract(data.back()));
  }
  const Common<std::array<MeetingPlace, 6>> places;
  Crew crew(kWorld, [&](int process) {
    struct Own {
      int rank;
      workload::Split split;
      std::size_t group;
      Layer layer;
    };
    std::list<Own> own;
    for (std::size_t g = 0; g < groups.size(); ++g) {
      const auto at = std::ranges::find(groups[g], process);
      if (at == groups[g].end()) continue;
      const int rank = static_cast<int>(at - groups[g].begin());
      const int size = static_cast<int>(groups[g].size());
      workload::Split split(data[g], size);
      const Problem problem = split.problem();
      own.push_back(
          {rank, std::move(split), g,
           Layer(problem, Communicator::from_callbacks((*places)[g].options(rank, size)))});
    }
    for (int step = 0; step < 3; ++step) {
      for (Own& o : own) {
        expect_step(o.layer, o.split, o.rank, want[o.group], {}, cat("group ", o.group));
      }
    }
    own.pop_front();  // the world goes; its parts stay
    for (Own& o : own) expect_step(o.layer, o.split, o.rank, want[o.group], {}, "without a world");
    return std::string("fine");
  });
  expect_all_fine(crew);
}

TEST(ProcessGroup, ManyLayersComeAndGo) {
  constexpr int kRanks = 2;
  const LayerData data = plain_layer(kRanks);
  const workload::Split split(data, kRanks);
  const LayerResult want = reference::contract(data);
  const Common<MeetingPlace> place;
  Crew crew(kRanks, [&](int rank) {
    const Communicator member = Communicator::from_callbacks(place->options(rank, kRanks));
    Layer first(split.problem(), member);
    for (int i = 0; i < 20; ++i) {
      Layer layer(split.problem(), member);
      expect_step(layer, split, rank, want, {}, cat("layer ", i));
      expect_step(first, split, rank, want, {}, "the first layer");
    }
    return std::string("fine");
  });
  expect_all_fine(crew);
}

TEST(ProcessGroup, AnArgumentThatARankRefusesIsNoFailure) {
  const LayerData data = plain_layer(2);
  const workload::Split split(data, 2);
  const LayerResult want = reference::contract(data);
  const Common<MeetingPlace> place;
  Crew crew(2, [&](int rank) {
    const Communicator member = Communicator::from_callbacks(place->options(rank, 2));
    Layer layer(split.problem(), member);
    std::vector<std::int32_t> ids(split.topk_ids(rank).begin(), split.topk_ids(rank).end());
    if (rank == 1) ids[0] = 1000;
    try {
      layer.plan(ids);
      ADD_FAILURE() << "no error";
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), ErrorCode::kInvalidArgument) << e.what();
      EXPECT_NE(std::string(e.what()).find("rank 1"), std::string::npos) << e.what();
    }
    expect_step(layer, split, rank, want, {}, "after a refusal");
    return std::string("fine");
  });
  expect_all_fine(crew);
}

TEST(ProcessGroup, RanksMustEmulateTheSameLink) {
  const Common<MeetingPlace> place;
  Crew crew(2, [&](int rank) {
    setenv("UNIEP_CPU_LINK_GBPS", rank == 0 ? "1" : "2", 1);
    Communicator::from_callbacks(place->options(rank, 2));
    return std::string("joined");
  });
  for (const Crew::End& end : crew.ends()) {
    EXPECT_NE(end.said.find("rank 1 calls CPU group with UNIEP_CPU_LINK_GBPS=2"), std::string::npos)
        << end.said;
    EXPECT_EQ(end.exit_code, 1);
  }
}

// ---- Ranks that leave

/// A group whose ranks run `body` with a layer of their own.
struct SmallGroup {
  explicit SmallGroup(int size) : SmallGroup(plain_layer(size), size) {}
  SmallGroup(LayerData layer, int size)
      : ranks(size), data(std::move(layer)), split(data, size), want(reference::contract(data)) {}
  Communicator join(int rank) const {
    return Communicator::from_callbacks(place->options(rank, ranks));
  }
  const int ranks;
  const LayerData data;
  const workload::Split split;
  const LayerResult want;
  const Common<MeetingPlace> place;
};

TEST(ProcessGroup, WhoIsDoneMayLeaveWhileOthersStillWork) {
  for (const bool goodbye : {true, false}) {
    for (const char* link : {"", "0.002"}) {
      const SmallGroup g(3);
      Crew crew(g.ranks, [&](int rank) {
        setenv("UNIEP_CPU_LINK_GBPS", link, 1);
        setenv("UNIEP_CPU_LINK_LATENCY_US", "100000", 1);
        const bool slow = rank == 1;
        {
          Layer layer(
              g.split.problem(), g.join(rank),
              {.timeout_ms = kLongLimitMs, .fault_injection = {.max_delay_us = slow ? 20000 : 0}});
          expect_step(layer, g.split, rank, g.want, {}, "the last step");
          // With a link, what is under way needs somebody who delivers it.
          if (!goodbye && link[0] == '\0') _exit(::testing::Test::HasFailure() ? 2 : 0);
        }
        return std::string("fine");
      });
      for (const Crew::End& end : crew.ends()) {
        EXPECT_EQ(end.exit_code, 0) << end.said << ", link " << link << ", goodbye " << goodbye;
        EXPECT_EQ(end.signal, 0);
        EXPECT_EQ(end.said.find("error"), std::string::npos) << end.said;
      }
    }
  }
}

/// Every token goes to the other rank's experts.
LayerData crossed_layer() {
  LayerData d = plain_layer(2);
  const auto half = d.topk_ids.size() / 2;
  for (std::size_t i = 0; i < d.topk_ids.size(); ++i) {
    d.topk_ids[i] = static_cast<std::int32_t>(i % 2 + (i < half ? 2 : 0));
  }
  return d;
}

/// Rank 1 withholds signals that only rank 0 waits for, and goes.
std::string why_rank_0_stops(const std::function<void()>& farewell) {
  const SmallGroup g(crossed_layer(), 2);
  Crew crew(2, [&](int rank) {
    {
      Layer layer(g.split.problem(), g.join(rank),
                  {.timeout_ms = kLongLimitMs,
                   .fault_injection = {.withhold_rank = 1, .withhold_stage = Stage::kFc2}});
      LayerResult result = g.want;
      const RoutingPlan plan = layer.plan(g.split.topk_ids(rank));
      layer.forward(plan, g.split.forward_args(rank, result), parse_schedule("single"));
      if (rank == 1) farewell();
    }
    return std::string("fine");
  });
  const auto since = Clock::now();
  const pid_t pid = crew.pid(1);
  const Crew::End end = crew.end_of(0, since);
  EXPECT_LT(end.seconds, kSoonSeconds) << end.said;
  EXPECT_EQ(end.exit_code, 1);
  std::string said = end.said;
  const std::string number = cat("process ", pid);
  if (const auto at = said.find(number); at != std::string::npos) {
    said.replace(at, number.size(), "process N");
  }
  return said;
}

TEST(ProcessGroup, AWaitForARankThatHasGoneEndsAtOnce) {
  const std::string begin = cat("error ", static_cast<int>(ErrorCode::kPeerFailed),
                                ": the group is unusable since rank 1 failed: ");
  EXPECT_STATES(why_rank_0_stops([] {}),
                begin + "rank 1 has left the group, and its work is needed");
  EXPECT_STATES(why_rank_0_stops([] { _exit(0); }), begin + "rank 1 was lost: process N ended");
}

TEST(ProcessGroup, AnAgreementWithARankThatHasLeftEndsAtOnce) {
  for (const int leaver : {0, 1}) {
    const SmallGroup g(3);
    Crew crew(g.ranks, [&](int rank) {
      Layer layer(g.split.problem(), g.join(rank), {.timeout_ms = kLongLimitMs});
      if (rank == leaver) return std::string("left");
      layer.plan(g.split.topk_ids(rank));
      return std::string("planned");
    });
    const auto ends = crew.ends();
    for (int rank = 0; rank < g.ranks; ++rank) {
      const Crew::End& end = ends[static_cast<std::size_t>(rank)];
      EXPECT_LT(end.seconds, kSoonSeconds);
      if (rank == leaver) {
        EXPECT_EQ(end.said, "left");
      } else {
        EXPECT_NE(end.said.find(cat("rank ", leaver, " has left the group")), std::string::npos)
            << end.said;
      }
    }
  }
}

TEST(ProcessGroup, WhatARankThrowsEndsTheOthersWithItsSentence) {
  for (const int culprit : {0, 2}) {
    for (const bool in_run_ranks : {true, false}) {
      const SmallGroup g(3);
      Crew crew(g.ranks, [&](int rank) {
        const auto body = [&](Communicator& member) {
          Layer layer(g.split.problem(), member, {.timeout_ms = kLongLimitMs});
          if (rank == culprit) throw std::runtime_error("the data loader ran dry");
          for (;;) expect_step(layer, g.split, rank, g.want, {}, "without the culprit");
        };
        Communicator member = g.join(rank);
        if (in_run_ranks) {
          run_ranks({member}, body);
        } else {
          body(member);
        }
        return std::string("no error");
      });
      const auto ends = crew.ends();
      for (int rank = 0; rank < g.ranks; ++rank) {
        const Crew::End& end = ends[static_cast<std::size_t>(rank)];
        EXPECT_EQ(end.exit_code, 1);
        EXPECT_LT(end.seconds, kSoonSeconds);
        if (rank == culprit) {
          EXPECT_EQ(end.said, "exception: the data loader ran dry");
          continue;
        }
        const std::string reason =
            in_run_ranks ? "the data loader ran dry" : "it left with an exception on its way";
        EXPECT_STATES(end.said,
                      cat("error ", static_cast<int>(ErrorCode::kPeerFailed),
                          ": the group is unusable since rank ", culprit, " failed: ", reason));
        EXPECT_TRUE(end.said.ends_with(reason)) << end.said;
      }
    }
  }
}

// ---- Ranks that are killed or stopped

/// Steps until something goes wrong, on ranks that have met; `met` counts them.
Crew::Body steps_for_ever(const SmallGroup& g, const Common<std::atomic<int>>& met, int limit_ms,
                          unsigned seed) {
  return [&g, &met, limit_ms, seed](int rank) {
    setenv("UNIEP_TIMEOUT_MS", cat(limit_ms).c_str(), 1);
    GroupOptions options = g.place->options(rank, g.ranks);
    options.all_gather = [&, gather = options.all_gather](auto own, auto all) {
      gather(own, all);
      ++*met;
    };
    Layer layer(g.split.problem(), Communicator::from_callbacks(options),
                {.fault_injection = {.max_delay_us = seed % 3 == 0 ? 500 : 0, .seed = seed},
                 .schedule = Schedule{}});
    for (;;) expect_step(layer, g.split, rank, g.want, {}, "before the kill");
    return std::string("no error");
  };
}

void wait_until_all_met(const SmallGroup& g, const Common<std::atomic<int>>& met) {
  const auto until = Clock::now() + std::chrono::seconds(60);
  while (*met < g.ranks && Clock::now() < until) std::this_thread::sleep_for(milliseconds(1));
  EXPECT_EQ(*met, g.ranks) << "not all ranks came";
}

TEST(ProcessGroup, AKilledRankIsNamedByAllOthersAtOnce) {
  const auto before = shared_files();
  const int count = cases(20);
  double longest = 0;
  int with_process = 0;
  for (unsigned seed = 1; seed <= static_cast<unsigned>(count); ++seed) {
    Rng rng(seed);
    const SmallGroup g(static_cast<int>(pick(rng, 2, 4)));
    const int victim = static_cast<int>(pick(rng, 0, g.ranks - 1));
    const Common<std::atomic<int>> met;
    Crew crew(g.ranks, steps_for_ever(g, met, kLongLimitMs, seed));
    wait_until_all_met(g, met);
    // From joining over making the layer to somewhere in a step.
    std::this_thread::sleep_for(std::chrono::microseconds(pick(rng, 0, 60000)));
    const pid_t pid = crew.pid(victim);
    crew.signal(victim, SIGKILL);
    const auto since = Clock::now();
    for (int rank = 0; rank < g.ranks; ++rank) {
      const Crew::End end = crew.end_of(rank, since);
      if (rank == victim) {
        EXPECT_EQ(end.signal, SIGKILL);
        continue;
      }
      EXPECT_EQ(end.signal, 0);
      EXPECT_EQ(end.exit_code, 1);
      EXPECT_LT(end.seconds, kSoonSeconds) << "seed " << seed;
      EXPECT_TRUE(end.said.starts_with(cat("error ", static_cast<int>(ErrorCode::kPeerFailed))))
          << end.said << ", seed " << seed;
      EXPECT_NE(end.said.find(cat("rank ", victim, " ")), std::string::npos)
          << end.said << ", seed " << seed;
      with_process += end.said.find(cat("process ", pid, " ended")) != std::string::npos ? 1 : 0;
      longest = std::max(longest, end.seconds);
    }
    if (HasFailure()) break;
  }
  EXPECT_EQ(shared_files(), before);
  std::cout << count << " kills; the last survivor ended after at most " << longest << " s; "
            << with_process << " sentences name the process\n";
}

TEST(ProcessGroup, AStoppedRankEndsTheOthersAtTheTimeLimit) {
  constexpr int kLimitMs = 1500;
  const auto before = shared_files();
  const int count = cases(4);
  double longest = 0;
  int waits = 0, names = 0;
  for (unsigned seed = 1; seed <= static_cast<unsigned>(count); ++seed) {
    Rng rng(seed);
    const SmallGroup g(static_cast<int>(pick(rng, 2, 4)));
    const int victim = static_cast<int>(pick(rng, 0, g.ranks - 1));
    const Common<std::atomic<int>> met;
    Crew crew(g.ranks, steps_for_ever(g, met, kLimitMs, seed));
    wait_until_all_met(g, met);
    std::this_thread::sleep_for(std::chrono::microseconds(pick(rng, 0, 60000)));
    crew.signal(victim, SIGSTOP);
    const auto since = Clock::now();
    for (int rank = 0; rank < g.ranks; ++rank) {
      if (rank == victim) continue;
      const Crew::End end = crew.end_of(rank, since);
      EXPECT_EQ(end.signal, 0);
      EXPECT_EQ(end.exit_code, 1);
      EXPECT_LT(end.seconds, 2 * kLimitMs * 1e-3 + kSoonSeconds) << "seed " << seed;
      EXPECT_NE(end.said.find("wait expired after"), std::string::npos)
          << end.said << ", seed " << seed;
      ++waits;
      names += end.said.find(cat("peer ", victim, ":")) != std::string::npos ? 1 : 0;
      longest = std::max(longest, end.seconds);
    }
    crew.signal(victim, SIGCONT);
    const Crew::End woken = crew.end_of(victim, Clock::now());
    EXPECT_EQ(woken.exit_code, 1) << woken.said;
    EXPECT_TRUE(woken.said.starts_with("error ")) << woken.said;
    if (HasFailure()) break;
  }
  EXPECT_EQ(shared_files(), before);
  std::cout << count << " stops; the last survivor ended after at most " << longest << " s, limit "
            << kLimitMs << " ms; " << names << " of " << waits
            << " sentences name the stopped rank as the peer that was waited for\n";
}

}  // namespace
}  // namespace uniep::testing
