#include "tune/model/gathered_hosts.h"

#include <algorithm>

#include "plan/routing.h"
#include "schedule/open_sizes.h"
#include "schedule/token_waves.h"
#include "tune/model/cost_model.h"

namespace uniep::tune {
namespace {

Problem problem_of_host(const Problem& all, int hosts, int host, CrossesUnder under,
                        bool all_rows) {
  Problem problem = all;
  problem.num_experts = all.num_experts / hosts;
  problem.combine_groups = 1;
  problem.max_tokens = all.max_tokens * hosts;
  problem.gathered_hosts = hosts;
  problem.slot_rows = all_rows && hosts > 1;
  if (under == CrossesUnder::kPasses && hosts > 1) problem.first_host = host;
  return problem;
}

/// What the host takes from the count of tokens that cross, for which it waits, to the pass: for
/// each message that has an event of its own, and for all else (docs/research/cost_model.md).
constexpr double kSecondsOfMessage = 0.26e-3;
constexpr double kSecondsBesides = 0.9e-3;

/// How many slots of its host a token has that a rank sees.
std::int64_t slots_here(const RoutingPlan& plan, std::int64_t token) {
  const auto topk = static_cast<std::size_t>(plan.problem().topk);
  const auto slots = plan.topk_ids().subspan(static_cast<std::size_t>(token) * topk, topk);
  return std::ranges::count_if(slots, [](std::int32_t id) { return id >= 0; });
}

/// What crosses for the ranks of a host, in seconds and bytes. Blocks are the tokens of a rail's
/// ranks, by how many hosts behind this one theirs is.
class Messages {
 public:
  Messages(const GatheredHost& host, bool exact_hosts, const MachineProfile& profile,
           const Topology& topology)
      : hosts_(host.hosts),
        ranks_(static_cast<int>(std::ssize(host.plans))),
        block_(host.plans[0].problem().max_tokens / host.hosts),
        topk_(host.plans[0].problem().topk),
        all_rows_(host.plans[0].problem().slot_rows),
        profile_(profile),
        topology_(topology) {
    for (const RoutingPlan& plan : host.plans) {
      for (int step = 1; step < hosts_; ++step) {
        const Block all{block_, all_rows_ ? block_ * topk_ : block_};
        blocks_.push_back(exact_hosts ? needed(plan, (host.host + step) % hosts_) : all);
      }
    }
  }

  /// Something of every token of all other hosts.
  double of_all(double token_bytes) { return message(block_ * (hosts_ - 1) * ranks_, token_bytes); }

  /// Tokens of the hosts `first` to `last` behind this one, at once; and what goes back for them.
  double of_tokens(int first, int last, double token_bytes) {
    return of_blocks(first, last, &Block::tokens, token_bytes);
  }
  double back(int first, int last, double token_bytes) {
    return of_blocks(first, last, &Block::back, token_bytes);
  }

  /// Seconds to add up the sums of all hosts, which PyTorch reads and writes several times; or
  /// rows, once.
  double add_up(double token_bytes) const {
    if (hosts_ == 1) return 0;
    const double of_sums = hosts_ == 2 ? 5 : 8 + 5 * (hosts_ - 1);
    const double copies = all_rows_ ? topk_ + 1 : of_sums;
    const int workers = std::max(profile_.workers, 1);
    return copies * static_cast<double>(block_) * token_bytes * profile_.reduce.per_byte / workers;
  }

  /// What crosses for all ranks of the host.
  std::int64_t bytes() const { return bytes_; }

 private:
  /// The tokens of one rank: those that come, and the sums or rows that go back.
  struct Block {
    std::int64_t tokens = 0, back = 0;
  };

  Block needed(const RoutingPlan& plan, int of_host) const {
    Block found;
    for (std::int64_t token = 0; token < block_; ++token) {
      const std::int64_t slots = slots_here(plan, of_host * block_ + token);
      const std::int64_t comes = slots > 0 ? 1 : 0;
      found.tokens += comes;
      found.back += all_rows_ ? slots : comes;
    }
    return found;
  }

  double of_blocks(int first, int last, std::int64_t Block::*part, double token_bytes) {
    std::int64_t most = 0;
    for (int rank = 0; rank < ranks_; ++rank) {
      std::int64_t count = 0;
      for (int step = first; step <= last; ++step) {
        count += blocks_[static_cast<std::size_t>(rank * (hosts_ - 1) + step - 1)].*part;
      }
      most = std::max(most, count);
    }
    return message(most * ranks_, token_bytes);
  }

  /// So many tokens of all ranks, each of which has as many.
  double message(std::int64_t tokens, double token_bytes) {
    if (hosts_ == 1) return 0;
    const double bytes = static_cast<double>(tokens) * token_bytes;
    bytes_ += static_cast<std::int64_t>(bytes);
    return topology_.nic_latency_s + bytes / ranks_ / topology_.nic_bytes_per_s;
  }

  const int hosts_;
  const int ranks_;
  const std::int64_t block_;  ///< tokens that a rank has
  const int topk_;
  const bool all_rows_;
  const MachineProfile& profile_;
  const Topology& topology_;
  std::vector<Block> blocks_;  ///< [ranks, N - 1]
  std::int64_t bytes_ = 0;
};

class GatheredPass {
 public:
  GatheredPass(const GatheredHost& host, bool exact_hosts, Pass pass, const Schedule& schedule,
               const MachineProfile& profile, const Topology& topology)
      : plans_(host.plans),
        problem_(plans_[0].problem()),
        hosts_(host.hosts),
        exact_hosts_(exact_hosts),
        under_(host.under),
        pass_(pass),
        schedule_(with_forced_axes(schedule, problem_, pass)),
        profile_(profile),
        messages_(host, exact_hosts, profile, topology),
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
    const double begun = messages_.of_all(slots) + host_seconds();
    if (!comes_in_waves()) return collect(spread(begun) + part(PassPart::kWhole, {}));
    const std::vector<double> come = tokens_come(begun);
    const double done = part(PassPart::kWhole, come);
    // Behind the seam all but the last host's, those behind its own wave (token_waves.h).
    double back = result_.launch_ends[static_cast<std::size_t>(hosts_ - 1)];
    for (int step = 1; step < hosts_; ++step) {
      const bool is_last = step == hosts_ - 1 && has_seam(hosts_, pass_);
      if (is_last) back = std::max(back, result_.launch_ends[static_cast<std::size_t>(hosts_)]);
      back += messages_.back(step, step, token_bytes_);
    }
    return std::max(back, done);
  }

  double backward() {
    const std::vector<double> come = comes_in_waves() ? tokens_come(0) : std::vector<double>{};
    const double begun = comes_in_waves() ? 0 : spread(0);
    const double probs = 4.0 * problem_.topk;
    if (under_ == CrossesUnder::kNothing) {
      return collect(begun + part(PassPart::kWhole, {})) + messages_.of_all(probs);
    }
    const double data = begun + part(PassPart::kData, come);
    const double crossed = collect(messages_.of_all(probs));
    return data + std::max(crossed, part(PassPart::kWeights, {}));
  }

  /// Seconds of the host in which the GPU has nothing to do.
  double host_seconds() const {
    if (!exact_hosts_ || hosts_ == 1) return 0;
    return kSecondsBesides + kSecondsOfMessage * (comes_in_waves() ? hosts_ - 1 : 1);
  }

  bool comes_in_waves() const { return problem_.first_host >= 0; }

  /// When all tokens have come to all ranks that see them, and what they give has gone back.
  double spread(double begun) { return begun + messages_.of_tokens(1, hosts_ - 1, token_bytes_); }
  double collect(double begun) { return begun + messages_.back(1, hosts_ - 1, token_bytes_); }

  /// When tokens come, by wave, host after host; with later ones of forward none do.
  std::vector<double> tokens_come(double begun) {
    std::vector<double> come{begun};
    double there = begun;
    for (int step = 1; step < hosts_; ++step) {
      there += messages_.of_tokens(step, step, token_bytes_);
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
  const bool exact_hosts_;
  const CrossesUnder under_;
  const Pass pass_;
  const Schedule schedule_;
  const MachineProfile& profile_;
  Messages messages_;
  const double token_bytes_;
  SimulatedPass result_;
};

}  // namespace

GatheredHost gathered_host(const Problem& problem, int ranks, int hosts,
                           std::span<const std::int32_t> topk_ids, CrossesUnder under,
                           bool all_rows) {
  const int local_ranks = layout_of_hosts(ranks, hosts).local_ranks;
  const int experts = problem.num_experts / hosts;
  const int host = fullest_part(problem, hosts, topk_ids);
  const Problem of_host = problem_of_host(problem, hosts, host, under, all_rows);
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
  throw_if_any(check.fault, of_host, local_ranks);  // its plans would have no rows
  GatheredHost found{.hosts = hosts, .host = host, .under = under};
  for (int rank = 0; rank < local_ranks; ++rank) {
    found.plans.push_back(make_plan(of_host, rank, routing, check));
  }
  return found;
}

SimulatedPass simulate_gathered(const GatheredHost& host, bool exact_hosts, Pass pass,
                                const Schedule& schedule, const MachineProfile& profile,
                                const Topology& topology) {
  return GatheredPass(host, exact_hosts, pass, schedule, profile, topology).run();
}

}  // namespace uniep::tune
