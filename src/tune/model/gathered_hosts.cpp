#include "tune/model/gathered_hosts.h"

#include <algorithm>

#include "plan/routing.h"
#include "schedule/open_sizes.h"
#include "tune/model/cost_model.h"

namespace uniep::tune {
namespace {

Problem problem_of_host(const Problem& all, int hosts, int host, CrossesUnder under) {
  Problem problem = all;
  problem.num_experts = all.num_experts / hosts;
  problem.combine_groups = 1;
  problem.max_tokens = all.max_tokens * hosts;
  problem.gathered_hosts = hosts;
  if (under == CrossesUnder::kPasses && hosts > 1) problem.first_host = host;
  return problem;
}

/// What crosses for a rank, in seconds and bytes.
class Messages {
 public:
  Messages(const PlanData& plan, int hosts, const MachineProfile& profile, const Topology& topology)
      : ranks_(plan.num_ranks()),
        hosts_(hosts),
        tokens_(static_cast<double>(plan.problem.max_tokens / hosts)),
        profile_(profile),
        topology_(topology) {}

  /// Blocks of so many other hosts, one message or several side by side.
  double between(int blocks, double token_bytes) {
    if (blocks == 0) return 0;
    const double bytes = blocks * tokens_ * token_bytes;
    bytes_ += ranks_ * static_cast<std::int64_t>(bytes);
    return topology_.nic_latency_s + bytes / topology_.nic_bytes_per_s;
  }

  /// Of the sums of all hosts, which PyTorch reads and writes several times.
  double add_up(double token_bytes) const {
    if (hosts_ == 1) return 0;
    const double copies = hosts_ == 2 ? 5 : 8 + 5 * (hosts_ - 1);
    const int workers = std::max(profile_.workers, 1);
    return copies * tokens_ * token_bytes * profile_.reduce.per_byte / workers;
  }

  /// Of all ranks of the host.
  std::int64_t bytes() const { return bytes_; }

 private:
  const int ranks_;
  const int hosts_;
  const double tokens_;  ///< that a rank sends
  const MachineProfile& profile_;
  const Topology& topology_;
  std::int64_t bytes_ = 0;
};

class GatheredPass {
 public:
  GatheredPass(std::span<const RoutingPlan> plans, int hosts, CrossesUnder under, Pass pass,
               const Schedule& schedule, const MachineProfile& profile, const Topology& topology)
      : plans_(plans),
        problem_(plans[0].problem()),
        hosts_(hosts),
        under_(under),
        pass_(pass),
        schedule_(with_forced_axes(schedule, problem_, pass)),
        profile_(profile),
        messages_(plans[0].data(), hosts, profile, topology),
        token_bytes_(static_cast<double>(problem_.hidden * sizeof(bf16))) {}

  SimulatedPass run() {
    const double seconds = pass_ == Pass::kForward ? forward() : backward();
    result_.seconds = seconds + messages_.add_up(token_bytes_);
    result_.bytes.network += messages_.bytes();
    return std::move(result_);
  }

 private:
  double forward() {
    // Numbers of experts and probabilities first, of four bytes each.
    const double slots = 8.0 * problem_.topk;
    const double begun = messages_.between(hosts_ - 1, slots);
    if (!comes_in_waves()) {
      return collect(spread(begun) + part(PassPart::kWhole, {}), token_bytes_);
    }
    const std::vector<double> come = tokens_come(begun);
    const double done = part(PassPart::kWhole, come);
    double back = result_.launch_ends[static_cast<std::size_t>(hosts_ - 1)];
    for (int step = 1; step < hosts_; ++step) back += messages_.between(1, token_bytes_);
    return std::max(back, done);
  }

  double backward() {
    const std::vector<double> come = comes_in_waves() ? tokens_come(0) : std::vector<double>{};
    const double begun = comes_in_waves() ? 0 : spread(0);
    const double probs = 4.0 * problem_.topk;
    if (under_ == CrossesUnder::kNothing) {
      return collect(collect(begun + part(PassPart::kWhole, {}), token_bytes_), probs);
    }
    const double data = begun + part(PassPart::kData, come);
    const double crossed = messages_.between(hosts_ - 1, token_bytes_ + probs);
    return data + std::max(crossed, part(PassPart::kWeights, {}));
  }

  bool comes_in_waves() const { return problem_.first_host >= 0; }

  /// When all tokens have come to all ranks that see them, and what they give has gone back.
  double spread(double begun) { return begun + messages_.between(hosts_ - 1, token_bytes_); }
  double collect(double begun, double bytes) {
    return begun + messages_.between(hosts_ - 1, bytes);
  }

  /// When tokens come, by wave, host after host; with the last of forward none do.
  std::vector<double> tokens_come(double begun) {
    std::vector<double> come{begun};
    double there = begun;
    for (int step = 1; step < hosts_; ++step) {
      there += messages_.between(1, token_bytes_);
      come.push_back(there);
    }
    return come;
  }

  /// A part of the pass; its stages and bytes are added to those of the others.
  double part(PassPart part, const std::vector<double>& come) {
    SimulatedPass found =
        simulate(plans_, pass_, schedule_, profile_, {.part = part, .waves_come = come});
    if (result_.stats.empty()) {
      result_ = std::move(found);
      return result_.seconds;
    }
    result_.bytes.own += found.bytes.own;
    result_.bytes.nvlink += found.bytes.nvlink;
    result_.bytes.network += found.bytes.network;
    return found.seconds;
  }

  const std::span<const RoutingPlan> plans_;
  const Problem& problem_;
  const int hosts_;
  const CrossesUnder under_;
  const Pass pass_;
  const Schedule schedule_;
  const MachineProfile& profile_;
  Messages messages_;
  const double token_bytes_;
  SimulatedPass result_;
};

}  // namespace

std::vector<RoutingPlan> plans_of_gathered_host(const Problem& problem, int ranks, int hosts,
                                                std::span<const std::int32_t> topk_ids,
                                                CrossesUnder under) {
  const int local_ranks = layout_of_hosts(ranks, hosts).local_ranks;
  const int experts = problem.num_experts / hosts;
  const int host = fullest_part(problem, hosts, topk_ids);
  const Problem of_host = problem_of_host(problem, hosts, host, under);
  const std::vector<std::int64_t> tokens(static_cast<std::size_t>(local_ranks), of_host.max_tokens);
  validate(of_host, local_ranks);
  // A rank sees those of its rail, and slots of other hosts' experts as dropped.
  std::vector<std::int32_t> ids;
  ids.reserve(topk_ids.size());
  const auto slots = static_cast<std::size_t>(problem.max_tokens * problem.topk);
  for (int local = 0; local < local_ranks; ++local) {
    for (int source = local; source < ranks; source += local_ranks) {
      for (std::int32_t id : topk_ids.subspan(static_cast<std::size_t>(source) * slots, slots)) {
        id -= host * experts;
        ids.push_back(id >= 0 && id < experts ? id : -1);
      }
    }
  }
  const Routing routing{tokens, ids, 1};
  const RoutingCheck check = check_routing(of_host, routing);
  std::vector<RoutingPlan> plans;
  for (int rank = 0; rank < local_ranks; ++rank) {
    plans.push_back(make_plan(of_host, rank, routing, check));
  }
  return plans;
}

SimulatedPass simulate_gathered(std::span<const RoutingPlan> plans, int hosts, CrossesUnder under,
                                Pass pass, const Schedule& schedule, const MachineProfile& profile,
                                const Topology& topology) {
  return GatheredPass(plans, hosts, under, pass, schedule, profile, topology).run();
}

}  // namespace uniep::tune
