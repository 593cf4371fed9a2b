#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "base/expert_numbers.h"
#include "plan/page_lease.h"
#include "plan/routing_fault.h"
#include "uniep/rank_layout.h"
#include "uniep/routing_plan.h"

namespace uniep {

struct PlanData;

/// What memory a step needs depends on these numbers of a plan alone.
struct PlanCounts {
  std::int64_t padded_rows = 0;
  std::int64_t received = 0;  // tokens, each once
};

/// The plan where a backend has it, when that is not the host.
class RemotePlan {
 public:
  virtual ~RemotePlan() = default;
  /// Fills what depends on the routing in the host's copy; waits for the device.
  virtual void fetch(PlanData& plan) = 0;
  /// Fetches the counts alone; likewise.
  virtual PlanCounts fetch_counts(const PlanData& plan) = 0;
};

/// What a RoutingPlan holds: see its accessors for shapes. With `remote`, only what does not depend
/// on other ranks' routing is there until somebody asks for the rest.
struct PlanData {
  /// The plan of a rank of ranks in this layout, none of which has tokens yet.
  PlanData(const Problem& of, int own_rank, const RankLayout& of_ranks)
      : problem(of),
        rank(own_rank),
        layout(of_ranks),
        num_local_experts(expert_numbers(of, of_ranks.ranks()).of_rank()),
        tokens_per_rank(static_cast<std::size_t>(of_ranks.ranks())) {}

  Problem problem;
  int rank;
  RankLayout layout;
  int num_local_experts;  // with the shared ones, which stand behind the others
  std::vector<std::int64_t> tokens_per_rank;
  std::vector<std::int32_t> topk_ids;
  std::vector<std::int32_t> all_topk_ids;  // rank after rank; of groups of several hosts alone
  std::vector<std::int64_t> tokens_per_expert;
  std::vector<std::int64_t> segment_begin;
  std::vector<RowOrigin> row_origin;
  std::vector<Pull> pulls;
  std::vector<std::int64_t> pull_rows;
  std::vector<std::int32_t> pull_of_row;  // of a plan that is made on the host; -1 for pad rows
  Traffic traffic;
  /// A hash of the global routing: equal on all ranks that hold plans of the same batch.
  std::uint64_t fingerprint = 0;
  /// Passes of a plan that has a fault fill their results instead of throwing
  /// (CallOptions::overflow).
  bool flagged = false;
  RoutingFault fault;  // of a plan on the host; then it has no rows
  /// The pages of its saved rows, of a layer with a row pool ...
  std::shared_ptr<PageLease> lease;
  /// ... and on the host where they are: by row / row_align. Kept by `lease`.
  const std::int32_t* pages = nullptr;

  std::unique_ptr<RemotePlan> remote;
  mutable std::once_flag fetched;
  mutable std::once_flag counted;
  mutable PlanCounts remote_counts;  // once counted

  /// As of a batch whose slots are all dropped: of a routing that has a fault.
  void set_no_rows() {
    const auto experts = static_cast<std::size_t>(num_local_experts);
    topk_ids.assign(static_cast<std::size_t>(tokens() * problem.topk), -1);
    tokens_per_expert.assign(experts, 0);
    segment_begin.assign(experts + 1, 0);
  }

  /// All of it, fetched first where it lies elsewhere.
  const PlanData& on_host() const {
    if (remote) {
      std::call_once(fetched, [this] { remote->fetch(const_cast<PlanData&>(*this)); });
    }
    return *this;
  }

  PlanCounts counts() const {
    if (!remote) return {segment_begin.back(), static_cast<std::int64_t>(pulls.size())};
    std::call_once(counted, [this] { remote_counts = remote->fetch_counts(*this); });
    return remote_counts;
  }

  int num_ranks() const { return static_cast<int>(tokens_per_rank.size()); }
  std::int64_t tokens() const { return tokens_per_rank[static_cast<std::size_t>(rank)]; }
  int first_expert() const { return rank * (num_local_experts - problem.shared_experts); }
};

}  // namespace uniep
