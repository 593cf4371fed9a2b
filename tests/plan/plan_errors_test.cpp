// Every sentence with which RoutingPlan refuses a routing, the same on every rank.
#include <gtest/gtest.h>

#include "support/cases.h"
#include "support/expect_error.h"
#include "support/random_routing.h"

namespace uniep::testing {
namespace {

/// 2 ranks with 2 and 1 tokens of 2 slots, 4 experts.
Routing small() {
  return {.problem = {.hidden = 8,
                      .intermediate = 8,
                      .num_experts = 4,
                      .topk = 2,
                      .max_tokens = 2,
                      .row_align = 16},
          .tokens = {2, 1},
          .ids = {0, 1, 2, 3, -1, 0}};
}

void expect_on_every_rank(ErrorCode code, const std::string& sentence, const Routing& r) {
  for (int rank = 0; rank < r.ranks(); ++rank) {
    expect_error(code, sentence, [&] { r.plan(rank); });
  }
}

TEST(RoutingPlanErrors, ThePlainCaseIsAccepted) { EXPECT_NO_THROW(small().plan(1)); }

TEST(RoutingPlanErrors, IdTooLargeNamesRankTokenAndSlot) {
  Routing r = small();
  r.ids[5] = 4;
  expect_on_every_rank(ErrorCode::kInvalidArgument,
                       "topk_ids of rank 1, token 0, slot 1 is 4; -1 (dropped) to 3 is accepted",
                       r);
}

TEST(RoutingPlanErrors, IdBelowMinusOneNamesRankTokenAndSlot) {
  Routing r = small();
  r.ids[2] = -2;
  expect_on_every_rank(ErrorCode::kInvalidArgument,
                       "topk_ids of rank 0, token 1, slot 0 is -2; -1 (dropped) to 3 is accepted",
                       r);
}

TEST(RoutingPlanErrors, ExtremeIds) {
  for (const std::int32_t id :
       {std::numeric_limits<std::int32_t>::min(), std::numeric_limits<std::int32_t>::max()}) {
    Routing r = small();
    r.ids[0] = id;
    expect_on_every_rank(
        ErrorCode::kInvalidArgument,
        cat("topk_ids of rank 0, token 0, slot 0 is ", id, "; -1 (dropped) to 3 is accepted"), r);
  }
}

TEST(RoutingPlanErrors, TheFirstOfSeveralIsNamed) {
  Routing r = small();
  r.ids[2] = -2;
  r.ids[5] = 4;
  const std::string first =
      "topk_ids of rank 0, token 1, slot 0 is -2; -1 (dropped) to 3 is accepted";
  expect_on_every_rank(ErrorCode::kInvalidArgument, first, r);
  r.problem.capacity_rows = 16;
  expect_on_every_rank(ErrorCode::kInvalidArgument, first, r);
  r.tokens = {0, 3};
  expect_on_every_rank(ErrorCode::kInvalidArgument,
                       "rank 1 holds 3 tokens; 0 to max_tokens=2 is accepted", r);
}

TEST(RoutingPlanErrors, WrongNumberOfIds) {
  Routing r = small();
  r.ids.pop_back();
  expect_on_every_rank(ErrorCode::kInvalidArgument,
                       "topk_ids has 5 elements; 3 tokens with topk=2 need 6", r);
}

TEST(RoutingPlanErrors, MoreTokensThanMaxTokens) {
  Routing r = small();
  r.tokens = {0, 3};
  expect_on_every_rank(ErrorCode::kInvalidArgument,
                       "rank 1 holds 3 tokens; 0 to max_tokens=2 is accepted", r);
}

TEST(RoutingPlanErrors, NegativeTokens) {
  Routing r = small();
  r.tokens = {-1, 4};
  expect_on_every_rank(ErrorCode::kInvalidArgument,
                       "rank 0 holds -1 tokens; 0 to max_tokens=2 is accepted", r);
}

TEST(RoutingPlanErrors, ExpertsThatDoNotDivide) {
  Routing r = small();
  r.problem.num_experts = 5;
  expect_on_every_rank(ErrorCode::kInvalidArgument,
                       "problem.num_experts is 5, which 2 ranks do not divide; a multiple of the "
                       "number of ranks is accepted",
                       r);
}

TEST(RoutingPlanErrors, RankOutOfRange) {
  const Routing r = small();
  expect_invalid("rank is 2; 0 to 1 is accepted", [&] { r.plan(2); });
  expect_invalid("rank is -1; 0 to 1 is accepted", [&] { r.plan(-1); });
}

TEST(RoutingPlanErrors, NoRanks) {
  expect_invalid("number of ranks is 0; at least 1 is accepted",
                 [] { RoutingPlan::build(small().problem, 0, {}, {}); });
}

TEST(RoutingPlanErrors, TileThatDoesNotDivide) {
  const RoutingPlan plan = small().plan(0);
  for (const int tile_m : {-16, 0, 3, 32}) {
    expect_invalid(cat("tile_m is ", tile_m, "; a divisor of row_align=16 is accepted"),
                   [&] { plan.tiles(tile_m); });
  }
}

TEST(RoutingPlanErrors, CapacityNamesTheFullestRankAndWhatWouldDo) {
  Routing r = small();
  r.problem.capacity_rows = 16;
  expect_on_every_rank(ErrorCode::kCapacity,
                       "rank 0 would receive 32 rows (padding included), but capacity_rows is 16; "
                       "capacity_rows=32 would do for this routing",
                       r);
}

TEST(RoutingPlanErrors, RowsOfBackwardNameTheFullestExpertAndWhatWouldDo) {
  Routing r{.problem = {.hidden = 8,
                        .intermediate = 8,
                        .num_experts = 4,
                        .topk = 2,
                        .max_tokens = 20,
                        .row_align = 16,
                        .backward_rows = 32},
            .tokens = {20, 1},
            .ids = std::vector<std::int32_t>(42, 3)};
  std::fill_n(r.ids.begin(), 10, 1);  // 10 rows, and 32 for expert 3
  EXPECT_NO_THROW(r.plan(0));
  r.ids[9] = 3;
  expect_on_every_rank(ErrorCode::kCapacity,
                       "expert 3 of rank 1 would receive 48 rows (padding included), but "
                       "backward_rows is 32; backward_rows=48 or more would do for this routing, "
                       "or 0",
                       r);
  r.problem.backward_rows = 48;
  EXPECT_NO_THROW(r.plan(1));
  r.problem.capacity_rows = 16;  // said first
  expect_on_every_rank(ErrorCode::kCapacity,
                       "rank 1 would receive 48 rows (padding included), but capacity_rows is 16; "
                       "capacity_rows=48 would do for this routing",
                       r);
}

/// Reads the number after `words` in the sentence.
std::int64_t number_after(const std::string& sentence, const std::string& words) {
  return std::atoll(sentence.c_str() + sentence.find(words) + words.size());
}

TEST(RoutingPlanErrors, TheCapacityThatIsNamedWorksAndOneLessDoesNot) {
  const int count = cases(2000);
  int refused = 0;
  for (int seed = 1; seed <= count; ++seed) {
    Rng rng(static_cast<unsigned>(seed));
    Routing r = random_routing(rng, 40);
    r.problem.capacity_rows = 1;
    std::string sentence;
    try {
      r.plan(0);
      continue;  // nothing to receive
    } catch (const Error& e) {
      sentence = e.what();
    }
    ++refused;
    SCOPED_TRACE(cat("seed ", seed, ", ", describe(r)));
    const std::int64_t enough = number_after(sentence, "; capacity_rows=");
    const auto named_rank = static_cast<int>(number_after(sentence, "rank "));
    r.problem.capacity_rows = enough;
    for (int rank = 0; rank < r.ranks(); ++rank) ASSERT_LE(r.plan(rank).padded_rows(), enough);
    ASSERT_EQ(r.plan(named_rank).padded_rows(), enough);
    r.problem.capacity_rows = enough - 1;
    expect_on_every_rank(ErrorCode::kCapacity,
                         cat("rank ", named_rank, " would receive ", enough,
                             " rows (padding included), but capacity_rows is ", enough - 1,
                             "; capacity_rows=", enough, " would do for this routing"),
                         r);
    if (HasFailure()) return;
  }
  EXPECT_GT(refused, count / 2);
}

TEST(RoutingPlanErrors, TheDefaultCapacityOfASmallLayerIsEnoughForAnyRouting) {
  const int count = cases(2000);
  for (int seed = 1; seed <= count; ++seed) {
    Rng rng(static_cast<unsigned>(seed));
    const Routing r = random_routing(rng, 40);
    const std::int64_t capacity = capacity_rows(r.problem, r.ranks());
    for (int rank = 0; rank < r.ranks(); ++rank) {
      ASSERT_LE(r.plan(rank).padded_rows(), capacity) << describe(r);
    }
  }
}

}  // namespace
}  // namespace uniep::testing
