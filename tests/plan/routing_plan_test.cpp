// RoutingPlan::build against an implementation written from the design's words: a stable sort of
// the rank-concatenated routing by expert, and sets.
#include "uniep/routing_plan.h"

#include <gtest/gtest.h>

#include <map>
#include <set>
#include <tuple>

#include "plan/plan_data.h"
#include "support/cases.h"
#include "support/expect_error.h"
#include "support/random_routing.h"

namespace uniep::testing {
namespace {

/// One (token, k) copy.
struct Copy {
  int expert;
  RowOrigin origin;
};

/// Of the hosts whose tokens are gathered, a rank has a block of each.
int host_of(const Routing& r, std::int64_t token) {
  const Problem& p = r.problem;
  return p.gathered_hosts == 1 ? 0 : static_cast<int>(token / (p.max_tokens / p.gathered_hosts));
}

/// The copies of all experts in canonical order.
std::vector<Copy> sorted_copies(const Routing& r) {
  std::vector<Copy> copies;
  std::size_t i = 0;
  for (int source = 0; source < r.ranks(); ++source) {
    for (int token = 0; token < r.tokens[static_cast<std::size_t>(source)]; ++token) {
      for (int slot = 0; slot < r.problem.topk; ++slot, ++i) {
        if (r.ids[i] >= 0) copies.push_back({r.ids[i], {source, token, slot}});
      }
    }
  }
  std::ranges::stable_sort(copies, {}, [&](const Copy& copy) {
    return std::pair(copy.expert, host_of(r, copy.origin.token));
  });
  return copies;
}

struct NaivePlan {
  std::vector<std::int64_t> tokens_per_expert;
  std::vector<std::int64_t> segment_begin;
  std::vector<RowOrigin> row_origin;
  std::map<std::tuple<int, int, int>, std::set<std::int64_t>> pulls;  // host, source, token
};

/// Behind the rank's experts, numbered on from E, the shared ones: each has all of its tokens.
std::vector<Copy> copies_of_rank(const Routing& r, int rank) {
  std::vector<Copy> copies = sorted_copies(r);
  for (int s = 0; s < r.problem.shared_experts; ++s) {
    for (int token = 0; token < r.tokens[static_cast<std::size_t>(rank)]; ++token) {
      copies.push_back({r.problem.num_experts + s, {rank, token, r.problem.topk + s}});
    }
  }
  return copies;
}

NaivePlan naive_plan(const Routing& r, int rank) {
  const int local = r.problem.num_experts / r.ranks();
  const std::vector<Copy> copies = copies_of_rank(r, rank);
  std::vector<int> experts;
  for (int e = rank * local; e < (rank + 1) * local; ++e) experts.push_back(e);
  for (int s = 0; s < r.problem.shared_experts; ++s) experts.push_back(r.problem.num_experts + s);
  NaivePlan plan;
  for (const int expert : experts) {
    plan.segment_begin.push_back(static_cast<std::int64_t>(plan.row_origin.size()));
    std::int64_t rows = 0;
    for (const Copy& copy : copies) {
      if (copy.expert != expert) continue;
      const auto row = static_cast<std::int64_t>(plan.row_origin.size());
      const auto [source, token, slot] = copy.origin;
      plan.pulls[{host_of(r, token), source, token}].insert(row);
      plan.row_origin.push_back(copy.origin);
      ++rows;
    }
    plan.tokens_per_expert.push_back(rows);
    while (plan.row_origin.size() % static_cast<std::size_t>(r.problem.row_align) != 0) {
      plan.row_origin.push_back({-1, -1, -1});
    }
  }
  plan.segment_begin.push_back(static_cast<std::int64_t>(plan.row_origin.size()));
  return plan;
}

template <class T>
std::vector<T> list(std::span<const T> values) {
  return {values.begin(), values.end()};
}

void expect_same_rows(const RoutingPlan& plan, const NaivePlan& naive) {
  ASSERT_EQ(list(plan.tokens_per_expert()), naive.tokens_per_expert);
  ASSERT_EQ(list(plan.segment_begin()), naive.segment_begin);
  ASSERT_EQ(list(plan.row_origin()), naive.row_origin);
  ASSERT_EQ(plan.padded_rows(), static_cast<std::int64_t>(naive.row_origin.size()));
}

/// Each token once, in order, with all its rows ascending, end to end in pull_rows.
void expect_same_pulls(const RoutingPlan& plan, const NaivePlan& naive) {
  ASSERT_EQ(plan.pulls().size(), naive.pulls.size());
  std::size_t i = 0;
  std::int64_t first = 0;
  for (const auto& [name, rows] : naive.pulls) {
    const auto& [host, source, token] = name;
    const Pull& pull = plan.pulls()[i++];
    ASSERT_EQ(std::pair(pull.source, pull.token), std::pair(source, token));
    ASSERT_EQ(pull.first_row, first);
    const auto got = plan.pull_rows().subspan(static_cast<std::size_t>(pull.first_row),
                                              static_cast<std::size_t>(pull.num_rows));
    ASSERT_EQ(list(got), std::vector<std::int64_t>(rows.begin(), rows.end()));
    first += pull.num_rows;
  }
  ASSERT_EQ(static_cast<std::int64_t>(plan.pull_rows().size()), first);
}

void expect_traffic(const RoutingPlan& plan, const NaivePlan& naive) {
  Traffic want;
  for (const auto& [name, rows] : naive.pulls) {
    const auto n = static_cast<std::int64_t>(rows.size());
    want.rows += n;
    if (std::get<1>(name) == plan.rank()) continue;
    want.remote_rows += n;
    want.remote_pulls += 1;
  }
  const Traffic got = plan.traffic();
  ASSERT_EQ(std::tuple(got.rows, got.remote_rows, got.remote_pulls),
            std::tuple(want.rows, want.remote_rows, want.remote_pulls));
}

/// The tiles of every size that divides the alignment hold every real row once, in order, none of
/// two experts.
void expect_tiles(const RoutingPlan& plan) {
  for (int tile_m = 1; tile_m <= plan.problem().row_align; tile_m *= 2) {
    std::int64_t next = 0;
    int expert = 0;
    for (const Tile& tile : plan.tiles(tile_m)) {
      while (next == plan.segment_begin()[expert] + plan.tokens_per_expert()[expert] ||
             plan.tokens_per_expert()[expert] == 0) {
        next = plan.segment_begin()[static_cast<std::size_t>(++expert)];
      }
      ASSERT_EQ(tile.expert, expert);
      ASSERT_EQ(tile.first_row, next);
      ASSERT_GE(tile.rows, 1);
      const std::int64_t left =
          plan.segment_begin()[expert] + plan.tokens_per_expert()[expert] - next;
      ASSERT_EQ(tile.rows, std::min<std::int64_t>(tile_m, left));
      next += tile.rows;
    }
    while (expert < plan.num_local_experts() &&
           (next == plan.segment_begin()[expert] + plan.tokens_per_expert()[expert] ||
            plan.tokens_per_expert()[expert] == 0)) {
      next = plan.segment_begin()[static_cast<std::size_t>(++expert)];
    }
    ASSERT_EQ(expert, plan.num_local_experts()) << "rows without a tile, tile_m=" << tile_m;
  }
}

void expect_own_facts(const RoutingPlan& plan, const Routing& r) {
  const int rank = plan.rank();
  const auto before = std::accumulate(r.tokens.begin(), r.tokens.begin() + rank, std::int64_t{0});
  const auto first = r.ids.begin() + before * r.problem.topk;
  ASSERT_EQ(plan.problem(), r.problem);
  ASSERT_EQ(plan.num_ranks(), r.ranks());
  ASSERT_EQ(plan.tokens(), r.tokens[static_cast<std::size_t>(rank)]);
  ASSERT_EQ(list(plan.tokens_per_rank()), r.tokens);
  const int local = r.problem.num_experts / r.ranks();
  ASSERT_EQ(plan.num_local_experts(), local + r.problem.shared_experts);
  ASSERT_EQ(plan.first_expert(), rank * local);
  ASSERT_EQ(list(plan.topk_ids()),
            std::vector<std::int32_t>(first, first + plan.tokens() * r.problem.topk));
}

TEST(RoutingPlan, IsTheStableSortOfTheConcatenatedRouting) {
  const int count = cases(20000);
  for (int seed = 1; seed <= count; ++seed) {
    Rng rng(static_cast<unsigned>(seed));
    Routing r = random_routing(rng, seed % 20 == 0 ? 100 : 12);
    const int most_shared = std::min(3, kMaxTopk - r.problem.topk);
    if (seed % 3 == 0) r.problem.shared_experts = static_cast<int>(pick(rng, 0, most_shared));
    SCOPED_TRACE(cat("seed ", seed, ", ", describe(r)));
    const int rank = static_cast<int>(pick(rng, 0, r.ranks() - 1));
    const RoutingPlan plan = r.plan(rank);
    const NaivePlan naive = naive_plan(r, rank);
    expect_own_facts(plan, r);
    expect_same_rows(plan, naive);
    expect_same_pulls(plan, naive);
    expect_traffic(plan, naive);
    expect_tiles(plan);
    if (HasFatalFailure()) return;
  }
}

TEST(RoutingPlan, RanksTogetherHoldEverySlotOnce) {
  const int count = cases(3000);
  for (int seed = 1; seed <= count; ++seed) {
    Rng rng(static_cast<unsigned>(seed));
    const Routing r = random_routing(rng, 20);
    SCOPED_TRACE(cat("seed ", seed, ", ", describe(r)));
    std::map<std::tuple<int, int, int>, int> held_by;  // slot -> global expert
    for (int rank = 0; rank < r.ranks(); ++rank) {
      const RoutingPlan plan = r.plan(rank);
      for (int e = 0; e < plan.num_local_experts(); ++e) {
        for (std::int64_t i = 0; i < plan.tokens_per_expert()[e]; ++i) {
          const RowOrigin o = plan.row_origin()[plan.segment_begin()[e] + i];
          const bool first =
              held_by.emplace(std::tuple(o.source, o.token, o.slot), plan.first_expert() + e)
                  .second;
          ASSERT_TRUE(first) << "a slot has two rows";
        }
      }
    }
    std::size_t i = 0;
    std::size_t kept = 0;
    for (int source = 0; source < r.ranks(); ++source) {
      for (int token = 0; token < r.tokens[static_cast<std::size_t>(source)]; ++token) {
        for (int slot = 0; slot < r.problem.topk; ++slot, ++i) {
          if (r.ids[i] < 0) continue;
          ++kept;
          const auto row = held_by.find({source, token, slot});
          ASSERT_NE(row, held_by.end());
          ASSERT_EQ(row->second, r.ids[i]);
        }
      }
    }
    ASSERT_EQ(held_by.size(), kept) << "dropped slots have no rows";
  }
}

TEST(RoutingPlan, TheFingerprintIsThatOfTheBatch) {
  Rng rng(3);
  Routing r = random_routing(rng, 40);
  const std::uint64_t batch = r.plan(0).data().fingerprint;
  for (int rank = 0; rank < r.ranks(); ++rank) EXPECT_EQ(r.plan(rank).data().fingerprint, batch);
  r.ids.back() = r.ids.back() == 0 ? -1 : 0;
  EXPECT_NE(r.plan(0).data().fingerprint, batch);
}

/// Whatever stands before them.
TEST(RoutingPlan, TheFingerprintTellsWhichSlotIsDropped) {
  constexpr int kExperts = 8;
  Routing r{.problem = {.hidden = 8,
                        .intermediate = 8,
                        .num_experts = kExperts,
                        .topk = 2,
                        .max_tokens = 2,
                        .row_align = 16},
            .tokens = {2},
            .ids = {0, 0, 0, 0}};
  for (std::int32_t before = 0; before < kExperts; ++before) {
    for (std::int32_t e = 0; e < kExperts; ++e) {
      r.ids = {before, -1, e, -1};
      const std::uint64_t second = r.plan(0).data().fingerprint;
      r.ids = {before, -1, -1, e};
      EXPECT_NE(r.plan(0).data().fingerprint, second) << before << ", " << e;
    }
  }
}

TEST(RoutingPlan, TheFingerprintTellsWhoseTokensAreWhose) {
  Routing r{.problem = {.hidden = 8,
                        .intermediate = 8,
                        .num_experts = 4,
                        .topk = 1,
                        .max_tokens = 2,
                        .row_align = 16},
            .tokens = {2, 1},
            .ids = {0, 1, 2}};
  const std::uint64_t batch = r.plan(0).data().fingerprint;
  r.tokens = {1, 2};
  EXPECT_NE(r.plan(0).data().fingerprint, batch);
  r.tokens = {2, 1};
  std::swap(r.ids[0], r.ids[1]);
  EXPECT_NE(r.plan(0).data().fingerprint, batch);
}

TEST(RoutingPlan, TheRowsOfSharedExpertsCountInTheCapacity) {
  Routing r{.problem = {.hidden = 8,
                        .intermediate = 8,
                        .num_experts = 2,
                        .topk = 1,
                        .max_tokens = 20,
                        .capacity_rows = 64,
                        .row_align = 16},
            .tokens = {20, 3},
            .ids = std::vector<std::int32_t>(23, -1)};
  r.problem.shared_experts = 2;
  EXPECT_EQ(r.plan(0).padded_rows(), 64);
  EXPECT_EQ(r.plan(1).padded_rows(), 32);
  EXPECT_EQ(r.plan(1).received_tokens(), 3);
  EXPECT_EQ(rows_of_any_routing(r.problem, 2), 2 * 20 + 2 * 20 + 3 * 15);
  r.problem.capacity_rows = 48;
  expect_error(ErrorCode::kCapacity,
               "rank 0 would receive 64 rows (padding included), but capacity_rows is 48; "
               "capacity_rows=64 would do for this routing",
               [&] { r.plan(1); });
  r.problem.capacity_rows = 64;
  r.problem.backward_rows = 16;
  expect_error(ErrorCode::kCapacity,
               "shared expert 0 of rank 0 would receive 32 rows (padding included), but "
               "backward_rows is 16; backward_rows=32 or more would do for this routing, or 0",
               [&] { r.plan(1); });
}

TEST(RoutingPlan, CopiesMeanTheSamePlan) {
  Rng rng(1);
  const Routing r = random_routing(rng, 12);
  const RoutingPlan plan = r.plan(0);
  const RoutingPlan copy = plan;
  EXPECT_EQ(copy.row_origin().data(), plan.row_origin().data());
}

}  // namespace
}  // namespace uniep::testing
