// Sizes that a schedule leaves open follow the batch, in the same way on every rank.
#include "schedule/open_sizes.h"

#include <gtest/gtest.h>

#include "base/check.h"
#include "schedule/random_pass.h"

namespace uniep::testing {
namespace {

Schedule sized(std::int64_t max_tokens, int pull_tokens = 0, int token_block = 0) {
  return with_sizes({.pull_tokens = pull_tokens, .token_block = token_block},
                    {.max_tokens = max_tokens});
}

TEST(OpenSizes, AreThoseOfWholeBatchesFromSoManyTokensOn) {
  for (const std::int64_t tokens : {8192, 16384, 1 << 30}) {
    EXPECT_EQ(sized(tokens).pull_tokens, 8) << tokens;
    EXPECT_EQ(sized(tokens).token_block, 32) << tokens;
  }
}

TEST(OpenSizes, ShrinkWithTheBatch) {
  struct Case {
    std::int64_t tokens;
    int pull_tokens, token_block;
  };
  for (const Case& c : {Case{4096, 4, 32}, Case{2048, 2, 16}, Case{2047, 2, 16}, Case{1025, 2, 16},
                        Case{1024, 1, 8}, Case{512, 1, 4}, Case{129, 1, 2}, Case{128, 1, 1},
                        Case{64, 1, 1}, Case{1, 1, 1}, Case{0, 1, 1}}) {
    EXPECT_EQ(sized(c.tokens).pull_tokens, c.pull_tokens) << c.tokens;
    EXPECT_EQ(sized(c.tokens).token_block, c.token_block) << c.tokens;
  }
}

TEST(OpenSizes, PullsAreSmallWhereAllWorkersDispatch) {
  const auto pulls = [](const char* preset, std::int64_t tokens) {
    return with_sizes(parse_schedule(cat(preset, ",pull_tokens=0")), {.max_tokens = tokens})
        .pull_tokens;
  };
  EXPECT_EQ(pulls("sequential", 8192), 2);
  EXPECT_EQ(pulls("sequential", 2048), 2);
  EXPECT_EQ(pulls("sequential", 1024), 1);
  for (const char* preset : {"pipelined:2", "two-kernel", "single"}) {
    EXPECT_EQ(pulls(preset, 8192), 8) << preset;
  }
}

TEST(OpenSizes, TilesAreDrawnOneByOneWhereThereAreFew) {
  // Tiles of 128 x 256 of all dw2.
  const auto run = [](int experts, std::int64_t hidden, std::int64_t intermediate, int given = 0) {
    return with_sizes({.tile_m = 128, .tile_n = 256, .wgrad_run = given},
                      {.hidden = hidden, .intermediate = intermediate, .num_experts = experts})
        .wgrad_run;
  };
  EXPECT_EQ(run(128, 2048, 768), 8) << "6144";
  EXPECT_EQ(run(64, 1024, 512), 8) << "1024";
  EXPECT_EQ(run(64, 1024, 257), 8) << "as many, though not all are whole";
  EXPECT_EQ(run(63, 1024, 512), 7) << "1008";
  EXPECT_EQ(run(16, 1024, 512), 2) << "256";
  EXPECT_EQ(run(1, 64, 64), 1);
  EXPECT_EQ(run(1, 64, 64, 4), 4) << "given";
}

TEST(OpenSizes, LeaveGivenOnesAndAllElseAlone) {
  EXPECT_EQ(sized(64, 8, 32), (Schedule{.pull_tokens = 8, .token_block = 32}));
  EXPECT_EQ(sized(64, 8, 0), (Schedule{.pull_tokens = 8, .token_block = 1}));
  EXPECT_EQ(sized(8192, 0, 4), (Schedule{.pull_tokens = 8, .token_block = 4}));
}

TEST(OpenSizes, ARingOfRowsHasItsOwnValuesInBackwardAlone) {
  const Problem all{.max_tokens = 8192}, ring{.max_tokens = 8192, .backward_rows = 128};
  const Schedule s = parse_schedule(
      "sequential,expert_order=heavy-first,head_start=40,workers=3,dispatch_workers=9,lag=4,"
      "pull_tokens=0");
  EXPECT_EQ(schedule_of_pass(s, all, Pass::kBackward), with_sizes(s, all));
  EXPECT_EQ(schedule_of_pass(s, ring, Pass::kForward), with_sizes(s, ring));
  const Schedule in = schedule_of_pass(s, ring, Pass::kBackward);
  EXPECT_EQ(in.launch, LaunchGrouping::kSingle);
  EXPECT_EQ(in.wgrad, WgradPlacement::kInterleaved);
  EXPECT_EQ(in.dispatch_wire, DispatchWire::kRows);
  EXPECT_EQ(in.expert_order, ExpertOrder::kIndex);
  EXPECT_EQ(in.head_start, 0);
  EXPECT_EQ(in.dispatch_workers, 2) << "one computes";
  EXPECT_EQ(in.lag, 4);
  EXPECT_EQ(in.pull_tokens, 8) << "of one launch";
  EXPECT_EQ(in_ring(in), in);
}

/// A queue of products cannot take dispatch's tasks on a GPU.
TEST(OpenSizes, ARingOfRowsKeepsAWorkerThatDispatchesWhereDispatchWasAlone) {
  const Schedule alone = parse_schedule("sequential,dispatch_workers=0,workers=0");
  EXPECT_EQ(in_ring(alone).dispatch_workers, 1);
  const Schedule in_queue = parse_schedule("single,dispatch_workers=0,workers=0");
  EXPECT_EQ(in_ring(in_queue).dispatch_workers, 0) << "as it was asked for";
}

/// A rank with few tokens or none cuts its tokens as the others expect it to.
TEST(OpenSizes, AreTheSameOnAllRanksAndNeverOpenInAPass) {
  for (unsigned seed = 1; seed <= static_cast<unsigned>(cases(200)); ++seed) {
    RandomPass p = random_pass(seed, 300);
    p.schedule.pull_tokens = p.schedule.token_block = 0;
    build_orders(p);
    for (int rank = 0; rank < p.ranks(); ++rank) {
      EXPECT_EQ(p.view(rank).schedule, schedule_of_pass(p.schedule, p.routing.problem, p.pass));
      EXPECT_GT(p.view(rank).schedule.pull_tokens, 0);
      EXPECT_GT(p.view(rank).schedule.token_block, 0);
    }
  }
}

}  // namespace
}  // namespace uniep::testing
