#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "layout/page_pool.h"
#include "plan/page_lease.h"
#include "plan/routing_fault.h"
#include "uniep/routing_plan.h"

namespace uniep {

/// The routing of all ranks: `topk_ids` is [sum of tokens_per_rank, K], rank after rank.
struct Routing {
  std::span<const std::int64_t> tokens_per_rank;
  std::span<const std::int32_t> topk_ids;
  int hosts = 1;  ///< that the ranks are on

  int num_ranks() const { return static_cast<int>(tokens_per_rank.size()); }
};

/// What can be said of a routing before rows are placed; every rank finds the same.
struct RoutingCheck {
  RoutingFault fault;
  std::vector<std::int64_t> rows_of_expert;  // by ExpertNumbers; empty with an impossible id
  std::vector<std::int64_t> received;        // by rank, with Save::kTokens: tokens; likewise
  std::int64_t most_rows = 0;                // of any rank, padding included; likewise 0
};

/// Throws Error(kInvalidArgument) where there are more or fewer ids than the tokens have.
RoutingCheck check_routing(const Problem& problem, const Routing& routing);

/// Pages that a rank saves, of a routing without a fault.
std::int64_t pages_of(const Problem& problem, int num_ranks, const RoutingCheck& check, int rank);

/// Adds the fault of row pools that are too full; `pools` has one for each rank.
void check_pages(const Problem& problem, std::span<const PageCount> pools, RoutingCheck& check);

/// Element 1 of CallOptions::overflow.
std::int64_t overflow_amount(const RoutingCheck& check, const Problem& problem);

/// The plan of `rank`, without rows where the check found a fault.
RoutingPlan make_plan(const Problem& problem, int rank, const Routing& routing,
                      const RoutingCheck& check, bool flagged = false,
                      std::shared_ptr<PageLease> lease = nullptr,
                      const std::int32_t* pages = nullptr);

/// A hash of the whole routing: equal where routings are, and next to never elsewhere.
std::uint64_t fingerprint(const Routing& routing);

}  // namespace uniep
