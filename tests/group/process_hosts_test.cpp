// CPU ranks as processes on several hosts, which UNIEP_HOSTS makes of one: the bits of one host, no
// memory in common, and hosts that fail.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <numeric>
#include <set>
#include <stdexcept>

#include "base/cpu_info.h"
#include "base/memory_info.h"
#include "group/communicator_impl.h"
#include "group/process_group.h"
#include "group/tcp_bootstrap.h"
#include "plan/host_routes.h"
#include "reference/contract.h"
#include "support/cases.h"
#include "support/expect_same.h"
#include "support/layer_group.h"
#include "support/process_group.h"

namespace uniep::testing {
namespace {

using Clock = std::chrono::steady_clock;

/// A wait that ends for another reason than its limit ends long before.
constexpr int kLongLimitMs = 60000;
constexpr double kSoonSeconds = 20;

void expect_all_fine(Crew& crew) {
  for (const Crew::End& end : crew.ends()) EXPECT_EQ(end.said, "fine");
}

/// Tokens with experts on several hosts, and on several ranks of a host.
LayerData crossing_layer(int ranks) {
  LayerData d = plain_layer(ranks, 6);
  d.topk = 4;
  d.topk_ids.clear();
  Rng rng(static_cast<unsigned>(ranks));
  std::vector<std::int32_t> experts(static_cast<std::size_t>(d.num_experts));
  std::iota(experts.begin(), experts.end(), 0);
  for (std::int64_t t = 0; t < d.tokens; ++t) {
    std::ranges::shuffle(experts, rng);
    d.topk_ids.insert(d.topk_ids.end(), experts.begin(), experts.begin() + d.topk);
  }
  d.topk_probs.resize(d.topk_ids.size());
  for (float& p : d.topk_probs) p = 0.01f * static_cast<float>(pick(rng, 1, 99));
  return d;
}

/// This process as a rank of a group on so many hosts.
Communicator join(MeetingPlace& place, int rank, int ranks, int hosts) {
  setenv("UNIEP_HOSTS", std::to_string(hosts).c_str(), 1);
  return Communicator::from_callbacks(place.options(rank, ranks));
}

/// A step of a layer whose results all processes compare with the contract, each its part.
class Steps {
 public:
  Steps(const LayerData& data, const LayerResult& want, const Communicator& member,
        const LayerOptions& options = {})
      : data_(data),
        want_(want),
        split_(data, member.size()),
        rank_(member.rank()),
        layer_(split_.problem(), member, options) {}

  void run(const Schedule& schedule, const std::string& what) {
    LayerResult result = want_;
    const auto poison = [](auto part, auto value) { std::ranges::fill(part, value); };
    constexpr bf16 kNan{0x7fff};
    poison(split_.forward_args(rank_, result).out, kNan);
    poison(split_.backward_args(rank_, result).dx, kNan);
    poison(split_.backward_args(rank_, result).dprobs, -1.0f);
    poison(std::get<ExpertMatrices<bf16>>(split_.backward_args(rank_, result).dw1).tensor(), kNan);
    const RoutingPlan plan = layer_.plan(split_.topk_ids(rank_));
    const Saved saved = layer_.forward(plan, split_.forward_args(rank_, result), schedule);
    layer_.backward(saved, split_.backward_args(rank_, result), schedule);
    expect_same_bits(result, want_, what);
  }

 private:
  const LayerData& data_;
  const LayerResult& want_;
  const workload::Split split_;
  const int rank_;
  Layer layer_;
};

/// Ranks whose memory this process has mapped.
std::set<std::string> mapped_ranks() {
  std::set<std::string> ranks;
  std::ifstream maps("/proc/self/maps");
  const std::string mark = "memfd:uniep:rank";
  for (std::string line; std::getline(maps, line);) {
    const std::size_t at = line.find(mark);
    if (at == std::string::npos) continue;
    ranks.insert(
        line.substr(at + mark.size(), line.find(':', at + mark.size()) - at - mark.size()));
  }
  return ranks;
}

struct Group {
  int ranks, hosts;
};
class ProcessHosts : public ::testing::TestWithParam<Group> {};
INSTANTIATE_TEST_SUITE_P(Groups, ProcessHosts,
                         ::testing::Values(Group{2, 2}, Group{4, 2}, Group{4, 4}, Group{8, 2},
                                           Group{8, 4}),
                         [](const auto& test) {
                           return cat(test.param.ranks, "on", test.param.hosts);
                         });

TEST_P(ProcessHosts, GiveTheBitsOfOneHostAndShareNoMemory) {
  const auto [ranks, hosts] = GetParam();
  const int count = cases(4);
  for (unsigned seed = 1; seed <= static_cast<unsigned>(count); ++seed) {
    Rng rng(1000u * static_cast<unsigned>(ranks + hosts) + seed);
    LayerData data = plain_layer(ranks);
    data.combine_groups = seed % 2 == 0 ? hosts : 1;
    data.combine_partials = seed % 4 == 0 ? CombinePartials::kBf16 : CombinePartials::kFp32;
    const LayerResult want = reference::contract(data);
    std::vector<Schedule> schedules = {parse_schedule("sequential"), parse_schedule("single")};
    for (int i = 0; i < 3; ++i) schedules.push_back(random_schedule(rng, {}, 3));
    if (ranks == 8 && seed <= 2) {  // every preset, with one combine group and one for each host
      for (const char* more : {"pipelined:2", "two-kernel"}) {
        schedules.push_back(parse_schedule(more));
      }
    }
    const Common<MeetingPlace> place;
    Crew crew(ranks, [&](int rank) {
      Steps steps(data, want, join(*place, rank, ranks, hosts),
                  {.fault_injection = {.max_delay_us = static_cast<int>(seed / 2 % 2) * 300,
                                       .seed = seed}});
      for (const Schedule& s : schedules) steps.run(s, cat("seed ", seed, ", ", to_string(s)));
      const int local = ranks / hosts;
      std::set<std::string> own;
      for (int l = 0; l < local; ++l) own.insert(std::to_string(rank / local * local + l));
      EXPECT_EQ(mapped_ranks(), own);
      return std::string("fine");
    });
    expect_all_fine(crew);
  }
}

/// Of many processes, every preset: with one combine group rows cross, and with one for each host,
/// sums. Those of 8 on several hosts are above.
class LargeGroups : public ::testing::TestWithParam<Group> {};
INSTANTIATE_TEST_SUITE_P(Groups, LargeGroups,
                         ::testing::Values(Group{8, 1}, Group{16, 1}, Group{16, 2}, Group{16, 4}),
                         [](const auto& test) {
                           return cat(test.param.ranks, "on", test.param.hosts);
                         });

TEST_P(LargeGroups, GiveTheBitsOfOneHostUnderEveryPreset) {
  const auto [ranks, hosts] = GetParam();
  std::vector<LayerData> layers;
  for (const int groups : {1, hosts}) {
    if (!layers.empty() && groups == 1) continue;
    layers.push_back(crossing_layer(ranks));
    layers.back().combine_groups = groups;
  }
  std::vector<LayerResult> wants;
  for (const LayerData& data : layers) wants.push_back(reference::contract(data));
  const Common<MeetingPlace> place;
  Crew crew(ranks, [&](int rank) {
    const Communicator member = join(*place, rank, ranks, hosts);
    for (std::size_t i = 0; i < layers.size(); ++i) {
      Steps steps(layers[i], wants[i], member);
      for (const char* preset : {"sequential", "pipelined:2", "two-kernel", "single"}) {
        steps.run(parse_schedule(preset), cat(preset, ", G = ", layers[i].combine_groups));
      }
    }
    return std::string("fine");
  });
  expect_all_fine(crew);
}

TEST(DisturbedHosts, OneWhoseTasksAreLateChangesNoBit) {
  LayerData data = crossing_layer(8);
  data.combine_groups = 4;
  const LayerResult want = reference::contract(data);
  const Common<MeetingPlace> place;
  Crew crew(8, [&](int rank) {
    const int delay_us = rank / 2 == 2 ? 2000 : 0;  // of host 2
    Steps steps(
        data, want, join(*place, rank, 8, 4),
        {.fault_injection = {.max_delay_us = delay_us, .seed = static_cast<unsigned>(rank)}});
    for (int i = 0; i < 3; ++i) steps.run(parse_schedule("single"), cat("step ", i));
    return std::string("fine");
  });
  expect_all_fine(crew);
}

/// What a port sends of one pass, on average over ranks.
double network_bytes(const LayerData& data, int ranks, int hosts) {
  const workload::Split split(data, ranks);
  std::vector<std::int64_t> tokens;
  for (int rank = 0; rank < ranks; ++rank) tokens.push_back(split.tokens(rank).size());
  const HostTraffic traffic = host_traffic(split.problem(), {tokens, data.topk_ids, hosts},
                                           layout_of_hosts(ranks, hosts), HostWire::kRelayed);
  return static_cast<double>((traffic.tokens.network + traffic.rows.network) * data.hidden * 2) /
         ranks;
}

TEST(DisturbedHosts, ASlowNetworkChangesNoBitAndTakesItsTime) {
  constexpr double kBytesPerSecond = 1e5;
  const LayerData data = crossing_layer(4);
  const LayerResult want = reference::contract(data);
  const Common<MeetingPlace> place;
  const Common<std::atomic<double>> longest;
  Crew crew(4, [&](int rank) {
    setenv("UNIEP_CPU_NETWORK_GBPS", cat(kBytesPerSecond * 1e-9).c_str(), 1);
    Steps steps(data, want, join(*place, rank, 4, 2));
    const auto begin = Clock::now();
    steps.run(parse_schedule("single"), "a step");
    const std::chrono::duration<double> seconds = Clock::now() - begin;
    double seen = *longest;
    while (seconds.count() > seen && !longest->compare_exchange_weak(seen, seconds.count())) {
    }
    return std::string("fine");
  });
  expect_all_fine(crew);
  EXPECT_GE(*longest, 2 * network_bytes(data, 4, 2) / kBytesPerSecond);
}

TEST(DisturbedHosts, ANetworkThatIsTooSlowIsAnErrorAtTheLimit) {
  const LayerData data = crossing_layer(4);
  const LayerResult want = reference::contract(data);
  const Common<MeetingPlace> place;
  Crew crew(4, [&](int rank) {
    setenv("UNIEP_CPU_NETWORK_GBPS", "0.000001", 1);
    Steps steps(data, want, join(*place, rank, 4, 2), {.timeout_ms = 700});
    steps.run(parse_schedule("single"), "a step");
    return std::string("fine");
  });
  for (const Crew::End& end : crew.ends()) {
    EXPECT_NE(end.said.find("700 ms"), std::string::npos) << end.said;
    EXPECT_LT(end.seconds, kSoonSeconds);
  }
}

/// Steps until an error ends them; then says which.
std::string step_until_it_fails(const LayerData& data, const LayerResult& want,
                                const Communicator& member, std::atomic<int>& begun) {
  Steps steps(data, want, member, {.timeout_ms = kLongLimitMs});
  for (int i = 0;; ++i) {
    steps.run(parse_schedule("single"), cat("step ", i));
    begun.fetch_add(i == 0 ? 1 : 0);
  }
}

/// How the processes that are left end when `attack(crew)` comes between their steps.
template <class Attack>
void expect_named_errors(const Group& group, const std::vector<int>& survivors,
                         const std::vector<std::string>& names, Attack&& attack) {
  const LayerData data = plain_layer(group.ranks);
  const LayerResult want = reference::contract(data);
  const Common<MeetingPlace> place;
  const Common<std::atomic<int>> begun;
  Crew crew(group.ranks, [&](int rank) {
    return step_until_it_fails(data, want, join(*place, rank, group.ranks, group.hosts), *begun);
  });
  while (*begun < group.ranks) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  const auto since = Clock::now();
  attack(crew);
  for (const int rank : survivors) {
    const Crew::End end = crew.end_of(rank, since);
    bool named = false;
    for (const std::string& name : names) named |= end.said.find(name) != std::string::npos;
    EXPECT_TRUE(named) << "rank " << rank << ": " << end.said;
    EXPECT_LT(end.seconds, kSoonSeconds) << "rank " << rank << ": " << end.said;
  }
}

TEST(FailingHosts, AKilledHostIsNamedOnEveryRank) {
  expect_named_errors({4, 2}, {0, 1}, {"rank 2 was lost", "rank 3 was lost"}, [](Crew& crew) {
    crew.signal(2, SIGKILL);
    crew.signal(3, SIGKILL);
  });
}

TEST(FailingHosts, AKilledHostOfFourIsNamedOnAllOthers) {
  expect_named_errors({8, 4}, {0, 1, 2, 3, 6, 7}, {"rank 4 was lost", "rank 5 was lost"},
                      [](Crew& crew) {
                        crew.signal(4, SIGKILL);
                        crew.signal(5, SIGKILL);
                      });
}

TEST(FailingHosts, TheHostOfRank0IsNamedOnEveryRank) {
  expect_named_errors({4, 2}, {2, 3}, {"rank 0 was lost", "rank 1 was lost"}, [](Crew& crew) {
    crew.signal(0, SIGKILL);
    crew.signal(1, SIGKILL);
  });
}

TEST(FailingHosts, AKilledProcessIsNamedOnBothHosts) {
  expect_named_errors({4, 2}, {0, 1, 2}, {"rank 3 was lost"},
                      [](Crew& crew) { crew.signal(3, SIGKILL); });
}

/// One of 4 ranks on 2 hosts ends when its rail is about to connect.
void expect_end_before_rails_is_named(int victim) {
  const Common<MeetingPlace> place;
  const auto since = Clock::now();
  Crew crew(4, [&](int rank) {
    setenv("UNIEP_HOSTS", "2", 1);
    GroupOptions options = place->options(rank, 4);
    options.timeout_ms = kLongLimitMs / 2;
    GroupMember member = join_group(options);
    if (rank == victim) member.before_rails = [] { raise(SIGKILL); };
    ProcessGroup::make(std::move(member));
    return std::string("joined");
  });
  for (int rank = 0; rank < 4; ++rank) {
    const Crew::End end = crew.end_of(rank, since);
    if (rank == victim) continue;
    EXPECT_NE(end.said.find(cat("rank ", victim)), std::string::npos) << rank << ": " << end.said;
    EXPECT_LT(end.seconds, kSoonSeconds) << rank << ": " << end.said;
  }
}

TEST(FailingHosts, ARankThatEndsWhileRailsConnectIsNamed) {
  for (const int victim : {0, 1, 3}) expect_end_before_rails_is_named(victim);
}

TEST(FailingHosts, ARankThatIsStoppedWhileRailsConnectIsNamedAtTheLimit) {
  const Common<MeetingPlace> place;
  const auto since = Clock::now();
  Crew crew(4, [&](int rank) {
    setenv("UNIEP_HOSTS", "2", 1);
    GroupOptions options = place->options(rank, 4);
    options.timeout_ms = 3000;
    GroupMember member = join_group(options);
    if (rank == 3) member.before_rails = [] { raise(SIGSTOP); };
    ProcessGroup::make(std::move(member));
    return std::string("joined");
  });
  for (const int rank : {0, 1, 2}) {
    const Crew::End end = crew.end_of(rank, since);
    for (const char* words : {"wait expired after 3000 ms", "stage connect", "peer 3"}) {
      EXPECT_NE(end.said.find(words), std::string::npos) << rank << ": " << end.said;
    }
    EXPECT_LT(end.seconds, kSoonSeconds) << rank << ": " << end.said;
  }
}

TEST(FailingHosts, WhatARankThrowsIsHeardOnBothHosts) {
  const LayerData data = plain_layer(4);
  const LayerResult want = reference::contract(data);
  const Common<MeetingPlace> place;
  Crew crew(4, [&](int rank) {
    const Communicator member = join(*place, rank, 4, 2);
    std::string said = "fine";
    try {
      run_ranks({member}, [&](Communicator& c) {
        Steps steps(data, want, c, {.timeout_ms = kLongLimitMs});
        steps.run({}, "first step");
        if (c.rank() == 2) throw std::runtime_error("rank 2 has had enough");
        steps.run({}, "second step");
      });
    } catch (const std::exception& e) {
      said = e.what();
    }
    return said;
  });
  for (const Crew::End& end : crew.ends()) {
    EXPECT_NE(end.said.find("rank 2"), std::string::npos) << end.said;
    EXPECT_LT(end.seconds, kSoonSeconds);
  }
}

TEST(FailingHosts, AStoppedHostIsMissedAtTheLimit) {
  const LayerData data = plain_layer(4);
  const LayerResult want = reference::contract(data);
  const Common<MeetingPlace> place;
  const Common<std::atomic<int>> begun;
  Crew crew(4, [&](int rank) {
    Steps steps(data, want, join(*place, rank, 4, 2), {.timeout_ms = 1500});
    for (int i = 0;; ++i) {
      steps.run(parse_schedule("single"), cat("step ", i));
      begun->fetch_add(i == 0 ? 1 : 0);
    }
    return std::string();
  });
  while (*begun < 4) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  const auto since = Clock::now();
  crew.signal(2, SIGSTOP);
  crew.signal(3, SIGSTOP);
  for (const int rank : {0, 1}) {
    const Crew::End end = crew.end_of(rank, since);
    EXPECT_NE(end.said.find("1500 ms"), std::string::npos) << end.said;
    EXPECT_LT(end.seconds, kSoonSeconds);
  }
}

/// As torchrun has it, on hosts of two ranks each.
void set_environment(int rank, int ranks, int port) {
  setenv("RANK", cat(rank).c_str(), 1);
  setenv("WORLD_SIZE", cat(ranks).c_str(), 1);
  setenv("LOCAL_RANK", cat(rank % 2).c_str(), 1);
  setenv("MASTER_ADDR", "127.0.0.1", 1);
  setenv("MASTER_PORT", cat(port).c_str(), 1);
}

TEST(HostsOfAGroup, TheEnvironmentIsAnotherSource) {
  const LayerData data = plain_layer(4);
  const LayerResult want = reference::contract(data);
  const int port = free_tcp_port();
  Crew crew(4, [&](int rank) {
    setenv("UNIEP_HOSTS", "2", 1);
    set_environment(rank, 4, port);
    Steps steps(data, want, Communicator::cpu_from_environment());
    steps.run({}, "a step");
    EXPECT_EQ(mapped_ranks().size(), 2u);
    return std::string("fine");
  });
  expect_all_fine(crew);
}

TEST(HostsOfAGroup, AWrongEnvironmentOfOneRankIsHeardOnAll) {
  const int port = free_tcp_port();
  Crew crew(2, [&](int rank) {
    setenv("UNIEP_HOSTS", rank == 1 ? "two" : "2", 1);
    set_environment(rank, 2, port);
    (void)Communicator::cpu_from_environment();
    return std::string("joined");
  });
  for (const Crew::End& end : crew.ends()) {
    EXPECT_NE(end.said.find("UNIEP_HOSTS is 'two'"), std::string::npos) << end.said;
  }
}

/// As on two hosts that were not made of one by UNIEP_HOSTS.
void be_on_host_of(int rank) {
  setenv("UNIEP_HOST_ID", rank < 2 ? "left" : "right", 1);
  setenv("UNIEP_SOCKET_IFNAME", "lo", 1);
}

TEST(HostsOfAGroup, AreFound) {
  const LayerData data = plain_layer(4);
  const LayerResult want = reference::contract(data);
  const Common<MeetingPlace> place;
  Crew crew(4, [&](int rank) {
    be_on_host_of(rank);
    const Communicator member = Communicator::from_callbacks(place->options(rank, 4));
    EXPECT_EQ(member.layout(), (RankLayout{.hosts = 2, .local_ranks = 2}));
    Steps steps(data, want, member);
    steps.run({}, "a step");
    EXPECT_EQ(mapped_ranks().size(), 2u);
    return std::string("fine");
  });
  expect_all_fine(crew);
}

/// Workers of a rank under a schedule that leaves their number open.
int open_workers(const Communicator& member, const LayerData& data) {
  const workload::Split split(data, member.size());
  LayerResult result = workload::make_result(data, {});
  Layer layer(split.problem(), member);
  const Schedule open = parse_schedule("single,workers=0,dispatch_workers=0");
  layer.forward(layer.plan(split.topk_ids(member.rank())),
                split.forward_args(member.rank(), result), open);
  return layer.last_pass().workers;
}

/// Half of what is free, divided by the ranks of the host: here one, so twice a quarter.
TEST(HostsOfAGroup, RanksDivideTheMemoryOfTheirOwnHost) {
  const LayerData data = plain_layer(2);
  const Common<MeetingPlace> place;
  Crew crew(2, [&](int rank) {
    be_on_host_of(2 * rank);
    const Communicator member = Communicator::from_callbacks(place->options(rank, 2));
    const RowPool pool(workload::Split(data, 2).problem(), member);
    EXPECT_GT(pool.bytes(), static_cast<std::int64_t>(available_memory() / 8 * 3));
    return std::string("fine");
  });
  expect_all_fine(crew);
}

TEST(HostsOfAGroup, RanksDivideTheCpusOfTheirOwnHost) {
  const LayerData data = plain_layer(2);
  for (const bool are_found : {true, false}) {
    const Common<MeetingPlace> place;
    Crew crew(2, [&](int rank) {
      if (are_found) be_on_host_of(2 * rank);
      const Communicator member = are_found ? Communicator::from_callbacks(place->options(rank, 2))
                                            : join(*place, rank, 2, 2);
      // Hosts that were made of one machine have its CPUs together.
      EXPECT_EQ(open_workers(member, data), std::max(1, usable_cpus() / (are_found ? 1 : 2)));
      return std::string("fine");
    });
    expect_all_fine(crew);
  }
}

TEST(HostsOfAGroup, SlurmIsAnotherSource) {
  const LayerData data = plain_layer(4);
  const LayerResult want = reference::contract(data);
  const int port = free_tcp_port();
  Crew crew(4, [&](int rank) {
    be_on_host_of(rank);
    setenv("SLURM_PROCID", cat(rank).c_str(), 1);
    setenv("SLURM_STEP_NUM_TASKS", "4", 1);
    setenv("SLURM_LOCALID", cat(rank % 2).c_str(), 1);
    setenv("SLURM_STEP_NODELIST", "localhost", 1);
    setenv("SLURM_JOB_ID", "7", 1);
    setenv("MASTER_PORT", cat(port).c_str(), 1);
    const Communicator member = Communicator::cpu_from_environment();
    EXPECT_EQ(member.layout(), (RankLayout{.hosts = 2, .local_ranks = 2}));
    Steps steps(data, want, member);
    steps.run({}, "a step");
    return std::string("fine");
  });
  expect_all_fine(crew);
}

/// Two runs that mpirun starts at a time on one host, with the same port.
TEST(HostsOfAGroup, RunsOfALauncherAreToldApart) {
  const int port = free_tcp_port();
  Crew crew(4, [&](int process) {
    const int rank = process % 2;
    setenv("OMPI_COMM_WORLD_RANK", cat(rank).c_str(), 1);
    setenv("OMPI_COMM_WORLD_SIZE", "2", 1);
    setenv("OMPI_COMM_WORLD_LOCAL_RANK", cat(rank).c_str(), 1);
    setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "2", 1);
    setenv("PMIX_NAMESPACE", process < 2 ? "first" : "second", 1);
    setenv("MASTER_PORT", cat(port).c_str(), 1);
    const Communicator member = Communicator::cpu_from_environment();
    const auto names =
        member.impl()->bootstrap().all_gather(process < 2 ? "first" : "second", "names", 60000);
    return names[0] == names[1] ? std::string("fine") : names[0] + " with " + names[1];
  });
  expect_all_fine(crew);
}

TEST(HostsOfAGroup, UnequalOnesAreRefused) {
  const Common<MeetingPlace> place;
  Crew crew(3, [&](int rank) {
    (void)join(*place, rank, 3, 2);
    return std::string("joined");
  });
  for (const Crew::End& end : crew.ends()) {
    EXPECT_NE(end.said.find("UNIEP_HOSTS is 2 in a group of 3 ranks"), std::string::npos)
        << end.said;
  }
}

TEST(HostsOfAGroup, RanksAgreeOnThem) {
  const Common<MeetingPlace> place;
  Crew crew(2, [&](int rank) {
    (void)join(*place, rank, 2, 1 + rank);
    return std::string("joined");
  });
  for (const Crew::End& end : crew.ends()) {
    EXPECT_NE(end.said.find("UNIEP_HOSTS is 1 on rank 0 and 2 on rank 1"), std::string::npos)
        << end.said;
  }
}

}  // namespace
}  // namespace uniep::testing
