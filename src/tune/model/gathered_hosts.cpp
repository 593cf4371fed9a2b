#include "tune/model/gathered_hosts.h"

#include <algorithm>

#include "base/problem_limits.h"
#include "plan/routing.h"
#include "schedule/open_sizes.h"
#include "schedule/token_waves.h"

namespace uniep::tune {
namespace {

/// The host whose experts have the most rows.
int fullest_host(int hosts, int experts_of_host, std::span<const std::int32_t> topk_ids) {
  std::vector<std::int64_t> rows(static_cast<std::size_t>(hosts));
  for (const std::int32_t e : topk_ids) {
    if (e >= 0 && e < hosts * experts_of_host) ++rows[static_cast<std::size_t>(e / experts_of_host)];
  }
  return static_cast<int>(std::ranges::max_element(rows) - rows.begin());
}

Problem problem_of_host(const Problem& all, int hosts, int host, CrossesUnder under) {
  Problem problem = all;
  problem.num_experts = all.num_experts / hosts;
  problem.combine_groups = 1;
  problem.max_tokens = all.max_tokens * hosts;
  if (under == CrossesUnder::kPasses && hosts > 1) {
    problem.gathered_hosts = hosts;
    problem.first_host = host;
  }
  return problem;
}

/// What crosses for a rank, in seconds and bytes.
class Messages {
 public:
  Messages(const PlanData& plan, int hosts, const MachineProfile& profile, const Topology& topology)
      : plan_(plan),
        ranks_(plan.num_ranks()),
        hosts_(hosts),
        tokens_(static_cast<double>(plan.problem.max_tokens / hosts)),
        profile_(profile),
        topology_(topology) {}

  /// Blocks of so many other hosts, one message or several side by side.
  double between(int blocks, double token_bytes) {
    if (blocks == 0) return 0;
    const double bytes = blocks * tokens_ * token_bytes;
    bytes_.network += ranks_ * static_cast<std::int64_t>(bytes);
    return topology_.nic_latency_s + bytes / topology_.nic_bytes_per_s;
  }

  /// On to or from the ranks of a host that see the tokens; of the ranks of so many hosts, from
  /// `first` on.
  double within(int first, int count, double token_bytes) {
    const std::vector<int> passed = passed_on(first, count);
    for (const int blocks : passed) {
      bytes_.nvlink += static_cast<std::int64_t>(blocks * tokens_ * token_bytes);
    }
    const int most = *std::ranges::max_element(passed);
    const LinkProfile& link = profile_.link;
    if (most == 0 || link.bytes_per_s == 0) return 0;
    return link.latency_s + most * tokens_ * token_bytes / link.bytes_per_s;
  }
  double within_all(double token_bytes) { return within(0, hosts_, token_bytes); }

  /// Of the sums of all hosts, which PyTorch reads and writes several times.
  double add_up(double token_bytes) const {
    if (hosts_ == 1) return 0;
    const double copies = hosts_ == 2 ? 5 : 8 + 5 * (hosts_ - 1);
    const int workers = std::max(profile_.workers, 1);
    return copies * tokens_ * token_bytes * profile_.reduce.per_byte / workers;
  }

  /// Of all ranks of the host.
  const LinkBytes& bytes() const { return bytes_; }

 private:
  /// By local rank that sees them, the blocks that come to it from others of its host. Rank
  /// h L + l of all, whose rail is local rank l, is seen by local rank (h L + l) / N. Each gets as
  /// many of others as it has for others, where all hosts are counted.
  std::vector<int> passed_on(int first, int count) const {
    std::vector<int> blocks(static_cast<std::size_t>(ranks_));
    for (int i = 0; i < count; ++i) {
      const int host = (first + i) % hosts_;
      for (int local = 0; local < ranks_; ++local) {
        const int seen_by = (host * ranks_ + local) / hosts_;
        if (seen_by != local) ++blocks[static_cast<std::size_t>(seen_by)];
      }
    }
    return blocks;
  }

  const PlanData& plan_;
  const int ranks_;
  const int hosts_;
  const double tokens_;  ///< that a rank sends
  const MachineProfile& profile_;
  const Topology& topology_;
  LinkBytes bytes_;
};

class GatheredPass {
 public:
  GatheredPass(std::span<const RoutingPlan> plans, int hosts, CrossesUnder under, Pass pass,
               const Schedule& schedule, const MachineProfile& profile, const Topology& topology)
      : plans_(plans),
        problem_(plans[0].problem()),
        hosts_(hosts),
        host_(problem_.first_host),
        under_(under),
        pass_(pass),
        schedule_(with_forced_axes(schedule, problem_, pass)),
        profile_(profile),
        messages_(plans[0].data(), hosts, profile, topology),
        token_bytes_(static_cast<double>(problem_.hidden * sizeof(bf16))) {}

  SimulatedPass run() {
    const double seconds = pass_ == Pass::kForward ? forward() : backward();
    result_.seconds = seconds + messages_.add_up(token_bytes_);
    const LinkBytes& crossed = messages_.bytes();
    result_.bytes.network += crossed.network;
    result_.bytes.nvlink += crossed.nvlink;
    return std::move(result_);
  }

 private:
  double forward() {
    // Numbers of experts and probabilities first, of four bytes each.
    const double slots = 8.0 * problem_.topk;
    const double begun = messages_.between(hosts_ - 1, slots) + messages_.within_all(slots);
    if (!comes_in_waves()) {
      return collect(spread(begun) + part(PassPart::kWhole, {}), token_bytes_);
    }
    const std::vector<double> come = tokens_come(begun);
    const double done = part(PassPart::kWhole, come);
    double back = result_.launch_ends[static_cast<std::size_t>(hosts_ - 1)];
    for (int step = 1; step < hosts_; ++step) {
      back += messages_.within(host_ + step, 1, token_bytes_);
      back += messages_.between(1, token_bytes_);
    }
    return std::max(back, done + messages_.within(host_, 1, token_bytes_));
  }

  double backward() {
    const std::vector<double> come = comes_in_waves() ? tokens_come(0) : std::vector<double>{};
    const double begun = comes_in_waves() ? 0 : spread(0);
    const double probs = 4.0 * problem_.topk;
    if (under_ == CrossesUnder::kNothing) {
      return collect(collect(begun + part(PassPart::kWhole, {}), token_bytes_), probs);
    }
    double data = begun + part(PassPart::kData, come);
    data += messages_.within_all(token_bytes_) + messages_.within_all(probs);
    const double crossed = messages_.between(hosts_ - 1, token_bytes_ + probs);
    return data + std::max(crossed, part(PassPart::kWeights, {}));
  }

  bool comes_in_waves() const { return problem_.gathered_hosts > 1; }

  /// All tokens, to all ranks that see them; when that is done.
  double spread(double begun) {
    return begun + messages_.between(hosts_ - 1, token_bytes_) + messages_.within_all(token_bytes_);
  }
  double collect(double begun, double bytes) {
    return begun + messages_.within_all(bytes) + messages_.between(hosts_ - 1, bytes);
  }

  /// By wave, host after host; with the last of forward none do.
  std::vector<double> tokens_come(double begun) {
    std::vector<double> come{begun + messages_.within(host_, 1, token_bytes_)};
    double there = begun;
    for (int step = 1; step < hosts_; ++step) {
      there += messages_.between(1, token_bytes_);
      there += messages_.within(host_ + step, 1, token_bytes_);
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
  const int host_;
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
  const int host = fullest_host(hosts, experts, topk_ids);
  const Problem of_host = problem_of_host(problem, hosts, host, under);
  const std::vector<std::int64_t> tokens(static_cast<std::size_t>(local_ranks), of_host.max_tokens);
  validate(of_host, local_ranks);
  // Slots of other hosts' experts are dropped ones to this host.
  std::vector<std::int32_t> ids(topk_ids.begin(), topk_ids.end());
  for (std::int32_t& id : ids) {
    id -= host * experts;
    if (id < 0 || id >= experts) id = -1;
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
