#include "uniep/routing_plan.h"

#include <algorithm>
#include <numeric>

#include "base/check.h"
#include "base/expert_numbers.h"
#include "base/math.h"
#include "base/mixed_bits.h"
#include "base/token_order.h"
#include "plan/plan_data.h"
#include "plan/routing.h"

namespace uniep {
namespace {

RoutingFault tokens_fault(const Problem& p, std::span<const std::int64_t> tokens_per_rank) {
  for (std::size_t r = 0; r < tokens_per_rank.size(); ++r) {
    const std::int64_t t = tokens_per_rank[r];
    if (t < 0 || t > p.max_tokens) {
      return {RoutingFault::Kind::kTokens, static_cast<std::int32_t>(r), -1, -1, t};
    }
  }
  return {};
}

/// Calls f(source, token, its K ids) in canonical order.
template <class F>
void for_each_token(const Problem& p, const Routing& routing, F&& f) {
  const auto ranks = static_cast<std::size_t>(routing.num_ranks());
  std::vector<std::int64_t> first(ranks);  // of each rank's tokens
  std::exclusive_scan(routing.tokens_per_rank.begin(), routing.tokens_per_rank.end(), first.begin(),
                      std::int64_t{0});
  const std::int64_t of_block = token_order(p, routing.num_ranks()).of_block();
  for (int host = 0; host < p.gathered_hosts; ++host) {
    for (std::size_t r = 0; r < ranks; ++r) {
      const std::int64_t end = std::min((host + 1) * of_block, routing.tokens_per_rank[r]);
      for (std::int64_t t = host * of_block; t < end; ++t) {
        const auto slot = static_cast<std::size_t>((first[r] + t) * p.topk);
        f(static_cast<int>(r), static_cast<std::int32_t>(t),
          routing.topk_ids.subspan(slot, static_cast<std::size_t>(p.topk)));
      }
    }
  }
}

RoutingFault id_fault(const Problem& p, const Routing& routing) {
  RoutingFault fault{};
  for_each_token(p, routing,
                 [&](int source, std::int32_t token, std::span<const std::int32_t> ids) {
                   if (fault.kind != RoutingFault::Kind::kNone) return;
                   for (std::int32_t k = 0; k < p.topk; ++k) {
                     const std::int32_t id = ids[static_cast<std::size_t>(k)];
                     if (id >= -1 && id < p.num_experts) continue;
                     fault = {RoutingFault::Kind::kExpertId, source, token, k, id};
                     return;
                   }
                 });
  return fault;
}

/// Rows of every expert of the layer, by its number (ExpertNumbers). All ranks compute all of them,
/// so that all find the same overflow.
std::vector<std::int64_t> count_rows(const Problem& p, const Routing& routing) {
  const ExpertNumbers numbers = expert_numbers(p, routing.num_ranks());
  std::vector<std::int64_t> rows(static_cast<std::size_t>(routing.num_ranks() * numbers.of_rank()));
  for (const std::int32_t e : routing.topk_ids) {
    if (e >= 0) ++rows[static_cast<std::size_t>(numbers.of_id(e))];
  }
  for (int rank = 0; rank < routing.num_ranks(); ++rank) {
    for (int s = 0; s < numbers.shared; ++s) {
      rows[static_cast<std::size_t>(numbers.of_shared(rank, s))] =
          routing.tokens_per_rank[static_cast<std::size_t>(rank)];
    }
  }
  return rows;
}

/// Calls f(source, token, k, number) for the slots that are not dropped, in canonical order, with
/// the number of the slot's expert.
template <class F>
void for_each_slot(const Problem& p, const Routing& routing, F&& f) {
  const ExpertNumbers numbers = expert_numbers(p, routing.num_ranks());
  for_each_token(p, routing,
                 [&](int source, std::int32_t token, std::span<const std::int32_t> ids) {
                   for (int k = 0; k < p.topk; ++k) {
                     const std::int32_t id = ids[static_cast<std::size_t>(k)];
                     if (id >= 0) f(source, token, k, numbers.of_id(id));
                   }
                   for (int s = 0; s < p.shared_experts; ++s) {
                     f(source, token, p.topk + s, numbers.of_shared(source, s));
                   }
                 });
}

/// The number of tokens that each rank receives.
std::vector<std::int64_t> count_received(const Problem& p, const Routing& routing) {
  const auto ranks = static_cast<std::size_t>(routing.num_ranks());
  std::vector<std::int64_t> received(ranks);
  std::vector<std::pair<int, std::int32_t>> counted(ranks, {-1, -1});  // the last token
  const int of_rank = expert_numbers(p, routing.num_ranks()).of_rank();
  for_each_slot(p, routing, [&](int source, std::int32_t token, int, std::int32_t number) {
    const auto rank = static_cast<std::size_t>(number / of_rank);
    const std::pair<int, std::int32_t> name{source, token};
    if (counted[rank] != name) ++received[rank];
    counted[rank] = name;
  });
  return received;
}

/// Rows that a rank receives, padding included.
std::int64_t rows_of_rank(const Problem& p, int num_ranks, const std::vector<std::int64_t>& rows,
                          int rank) {
  const std::size_t local = rows.size() / static_cast<std::size_t>(num_ranks);
  const std::size_t first = static_cast<std::size_t>(rank) * local;
  std::int64_t padded = 0;
  for (std::size_t e = first; e < first + local; ++e) {
    padded += round_up<std::int64_t>(rows[e], p.row_align);
  }
  return padded;
}

/// The rank that receives most.
RoutingFault fullest_rank(const Problem& p, int num_ranks, const std::vector<std::int64_t>& rows) {
  RoutingFault worst{RoutingFault::Kind::kCapacity, 0, -1, -1, 0};
  for (int r = 0; r < num_ranks; ++r) {
    const std::int64_t padded = rows_of_rank(p, num_ranks, rows, r);
    if (padded > worst.value) {
      worst.value = padded;
      worst.rank = r;
    }
  }
  return worst;
}

/// The expert that receives most, if backward has no room for its rows.
RoutingFault fullest_expert(const Problem& p, int num_ranks,
                            const std::vector<std::int64_t>& rows) {
  if (p.backward_rows == 0) return {};
  const auto fullest = std::ranges::max_element(rows);
  const auto number = static_cast<std::int32_t>(fullest - rows.begin());
  const std::int64_t padded = round_up<std::int64_t>(*fullest, p.row_align);
  if (padded <= p.backward_rows) return {};
  const int rank = number / expert_numbers(p, num_ranks).of_rank();
  return {RoutingFault::Kind::kExpertRows, rank, -1, number, padded};
}

/// Ends the pull of a token whose rows here are those of pull_rows from `first_row` on.
void add_pull(PlanData& plan, int source, std::int32_t token, std::size_t first_row) {
  const auto copies = static_cast<std::int32_t>(plan.pull_rows.size() - first_row);
  if (copies == 0) return;
  std::sort(plan.pull_rows.begin() + static_cast<std::ptrdiff_t>(first_row), plan.pull_rows.end());
  plan.pulls.push_back({source, token, static_cast<std::int32_t>(first_row), copies});
  plan.traffic.rows += copies;
  if (source == plan.rank) return;
  plan.traffic.remote_rows += copies;
  plan.traffic.remote_pulls += 1;
}

/// Rows in canonical order: walking the routing by (token, k), tokens in theirs, and appending each
/// copy to its expert's segment is that stable sort.
void place_rows(PlanData& plan, const Routing& routing) {
  const int first = plan.rank * plan.num_local_experts;
  std::vector<std::int64_t> next(plan.segment_begin.begin(), plan.segment_begin.end() - 1);
  plan.row_origin.assign(static_cast<std::size_t>(plan.segment_begin.back()), RowOrigin{});
  plan.pull_of_row.assign(plan.row_origin.size(), -1);
  std::pair<int, std::int32_t> pulled{-1, -1};  // source and token of the pull at hand
  std::size_t first_row = 0;
  const auto end_pull = [&] {
    add_pull(plan, pulled.first, pulled.second, first_row);
    first_row = plan.pull_rows.size();
  };
  for_each_slot(plan.problem, routing,
                [&](int source, std::int32_t token, int k, std::int32_t number) {
                  const int local = number - first;
                  if (local < 0 || local >= plan.num_local_experts) return;
                  if (pulled != std::pair{source, token}) end_pull();
                  pulled = {source, token};
                  const std::int64_t row = next[static_cast<std::size_t>(local)]++;
                  plan.row_origin[static_cast<std::size_t>(row)] = {source, token, k};
                  plan.pull_of_row[static_cast<std::size_t>(row)] =
                      static_cast<std::int32_t>(plan.pulls.size());
                  plan.pull_rows.push_back(row);
                });
  end_pull();
}

}  // namespace

std::uint64_t fingerprint(const Routing& routing) {
  std::uint64_t hash = 0;
  for (const std::int64_t tokens : routing.tokens_per_rank) {
    hash = hash_with(hash, static_cast<std::uint64_t>(tokens));
  }
  for (const std::int32_t id : routing.topk_ids) {
    hash = hash_with(hash, static_cast<std::uint32_t>(id));
  }
  return hash;
}

RoutingCheck check_routing(const Problem& p, const Routing& routing) {
  RoutingCheck check;
  check.fault = tokens_fault(p, routing.tokens_per_rank);
  if (check.fault.kind != RoutingFault::Kind::kNone) return check;
  const std::int64_t total = std::accumulate(routing.tokens_per_rank.begin(),
                                             routing.tokens_per_rank.end(), std::int64_t{0});
  const auto ids = static_cast<std::int64_t>(routing.topk_ids.size());
  require(ids == total * p.topk, ErrorCode::kInvalidArgument, "topk_ids has ", ids, " elements; ",
          total, " tokens with topk=", p.topk, " need ", total * p.topk);
  check.fault = id_fault(p, routing);
  if (check.fault.kind != RoutingFault::Kind::kNone) return check;
  check.rows_of_expert = count_rows(p, routing);
  if (p.save == Save::kTokens) {
    check.received = count_received(p, routing);
  }
  const RoutingFault fullest = fullest_rank(p, routing.num_ranks(), check.rows_of_expert);
  check.most_rows = fullest.value;
  check.fault = fullest.value > capacity_rows(p, routing.num_ranks())
                    ? fullest
                    : fullest_expert(p, routing.num_ranks(), check.rows_of_expert);
  return check;
}

std::int64_t pages_of(const Problem& p, int num_ranks, const RoutingCheck& check, int rank) {
  const std::int64_t rows = rows_of_rank(p, num_ranks, check.rows_of_expert, rank);
  const bool has_tokens = !check.received.empty();
  return page_shape(p).pages_of(rows,
                                has_tokens ? check.received[static_cast<std::size_t>(rank)] : 0);
}

void check_pages(const Problem& p, std::span<const PageCount> pools, RoutingCheck& check) {
  if (check.fault.kind != RoutingFault::Kind::kNone) return;
  const int ranks = static_cast<int>(pools.size());
  std::int64_t most = 0;
  for (int r = 0; r < ranks; ++r) {
    const PageCount& pool = pools[static_cast<std::size_t>(r)];
    const std::int64_t needed = pages_of(p, ranks, check, r);
    if (needed - pool.free <= most) continue;
    most = needed - pool.free;
    check.fault = {.kind = RoutingFault::Kind::kPages,
                   .rank = r,
                   .value = needed,
                   .held = pool.pages - pool.free,
                   .pool = pool.pages};
  }
}

std::int64_t overflow_amount(const RoutingCheck& check, const Problem& problem) {
  switch (check.fault.kind) {
    case RoutingFault::Kind::kPages:
      return pool_bytes_that_would_do(check.fault, problem);
    case RoutingFault::Kind::kExpertRows:
      return check.fault.value;
    default:
      return check.most_rows;
  }
}

RoutingPlan make_plan(const Problem& problem, int rank, const Routing& routing,
                      const RoutingCheck& check, bool flagged, std::shared_ptr<PageLease> lease,
                      const std::int32_t* pages) {
  const auto& tokens = routing.tokens_per_rank;
  auto plan = std::make_shared<PlanData>(problem, rank,
                                         layout_of_hosts(routing.num_ranks(), routing.hosts));
  plan->tokens_per_rank.assign(tokens.begin(), tokens.end());
  plan->fingerprint = fingerprint(routing);
  plan->flagged = flagged;
  plan->fault = check.fault;
  plan->lease = std::move(lease);
  plan->pages = pages;

  const std::int64_t first_token =
      std::accumulate(tokens.begin(), tokens.begin() + rank, std::int64_t{0});
  const auto own =
      routing.topk_ids.subspan(static_cast<std::size_t>(first_token * problem.topk),
                               static_cast<std::size_t>(plan->tokens() * problem.topk));
  plan->topk_ids.assign(own.begin(), own.end());

  if (check.fault.kind != RoutingFault::Kind::kNone) {
    plan->set_no_rows();
    return RoutingPlan(std::move(plan));
  }
  const auto first = check.rows_of_expert.begin() + rank * plan->num_local_experts;
  plan->tokens_per_expert.assign(first, first + plan->num_local_experts);
  plan->segment_begin.push_back(0);
  for (const std::int64_t n : plan->tokens_per_expert) {
    plan->segment_begin.push_back(plan->segment_begin.back() +
                                  round_up<std::int64_t>(n, problem.row_align));
  }
  place_rows(*plan, routing);
  if (routing.hosts > 1) {
    plan->all_topk_ids.assign(routing.topk_ids.begin(), routing.topk_ids.end());
  }
  return RoutingPlan(std::move(plan));
}

RoutingPlan RoutingPlan::build(const Problem& problem, int rank,
                               std::span<const std::int64_t> tokens_per_rank,
                               std::span<const std::int32_t> topk_ids) {
  const int num_ranks = static_cast<int>(tokens_per_rank.size());
  validate(problem, num_ranks);
  require(rank >= 0 && rank < num_ranks, ErrorCode::kInvalidArgument, "rank is ", rank, "; 0 to ",
          num_ranks - 1, " is accepted");
  const Routing routing{tokens_per_rank, topk_ids};
  const RoutingCheck check = check_routing(problem, routing);
  throw_if_any(check.fault, problem, num_ranks);
  return make_plan(problem, rank, routing, check);
}

const Problem& RoutingPlan::problem() const { return data_->problem; }
int RoutingPlan::rank() const { return data_->rank; }
int RoutingPlan::num_ranks() const { return data_->num_ranks(); }
std::int64_t RoutingPlan::tokens() const { return data_->tokens(); }
std::span<const std::int64_t> RoutingPlan::tokens_per_rank() const {
  return data_->on_host().tokens_per_rank;
}
std::span<const std::int32_t> RoutingPlan::topk_ids() const { return data_->on_host().topk_ids; }
int RoutingPlan::num_local_experts() const { return data_->num_local_experts; }
int RoutingPlan::first_expert() const { return data_->first_expert(); }
std::span<const std::int64_t> RoutingPlan::tokens_per_expert() const {
  return data_->on_host().tokens_per_expert;
}
std::span<const std::int64_t> RoutingPlan::segment_begin() const {
  return data_->on_host().segment_begin;
}
std::int64_t RoutingPlan::padded_rows() const { return data_->counts().padded_rows; }
std::int64_t RoutingPlan::received_tokens() const { return data_->counts().received; }
std::span<const RowOrigin> RoutingPlan::row_origin() const { return data_->on_host().row_origin; }
std::span<const Pull> RoutingPlan::pulls() const { return data_->on_host().pulls; }
std::span<const std::int64_t> RoutingPlan::pull_rows() const { return data_->on_host().pull_rows; }
Traffic RoutingPlan::traffic() const { return data_->on_host().traffic; }

std::vector<Tile> RoutingPlan::tiles(int tile_m) const {
  require(tile_m >= 1 && data_->problem.row_align % tile_m == 0, ErrorCode::kInvalidArgument,
          "tile_m is ", tile_m, "; a divisor of row_align=", data_->problem.row_align,
          " is accepted");
  std::vector<Tile> tiles;
  for (int e = 0; e < num_local_experts(); ++e) {
    const std::int64_t rows = data_->on_host().tokens_per_expert[static_cast<std::size_t>(e)];
    const std::int64_t begin = data_->on_host().segment_begin[static_cast<std::size_t>(e)];
    for (std::int64_t m = 0; m < rows; m += tile_m) {
      tiles.push_back(
          {begin + m, static_cast<std::int32_t>(min_of<std::int64_t>(tile_m, rows - m)), e});
    }
  }
  return tiles;
}

}  // namespace uniep
