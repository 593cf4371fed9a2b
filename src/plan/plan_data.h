#pragma once

#include <cstdint>
#include <vector>

#include "uniep/routing_plan.h"

namespace uniep {

/// What a RoutingPlan holds: see its accessors for shapes.
struct PlanData {
  Problem problem;
  int rank = 0;
  int num_local_experts = 0;
  std::vector<std::int64_t> tokens_per_rank;
  std::vector<std::int32_t> topk_ids;
  std::vector<std::int64_t> tokens_per_expert;
  std::vector<std::int64_t> segment_begin;
  std::vector<RowOrigin> row_origin;
  std::vector<Pull> pulls;
  std::vector<std::int64_t> pull_rows;
  Traffic traffic;
  /// Of the global routing: equal on all ranks that hold plans of the same batch.
  std::uint64_t fingerprint = 0;

  int num_ranks() const { return static_cast<int>(tokens_per_rank.size()); }
  std::int64_t tokens() const { return tokens_per_rank[static_cast<std::size_t>(rank)]; }
  int first_expert() const { return rank * num_local_experts; }
};

}  // namespace uniep
