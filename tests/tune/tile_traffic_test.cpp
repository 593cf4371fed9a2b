#include "tune/model/tile_traffic.h"

#include <gtest/gtest.h>

#include "schedule/pass_order.h"
#include "schedule/tasks_of_block.h"

namespace uniep::tune {
namespace {

/// Two experts of 512 rows on one rank: 4 x 8 tiles of fc1, of 128 rows and 128 columns (64 of
/// either half), summed over 256.
class TileTraffics : public ::testing::Test {
 protected:
  TileTraffics() {
    std::vector<std::int32_t> ids;
    for (int t = 0; t < 1024; ++t) ids.push_back(t % 2);
    const std::int64_t tokens[] = {1024};
    plan = RoutingPlan::build(problem, 0, tokens, ids);
  }

  /// Bytes of all tiles of a stage.
  double sum(Pass pass, Stage stage, const std::string& schedule, int workers,
             double cache_bytes) const {
    const Schedule s = parse_schedule("tile_m=128,tile_n=128," + schedule);
    const PassOrder order(plan->data(), pass, s);
    const PassView& v = order.view();
    const TileTraffic traffic(v, workers, cache_bytes);
    double bytes = 0;
    const bool by_expert = stage_grid(v, stage).rows > 0;
    const int blocks = by_expert ? v.num_local_experts : v.num_blocks();
    for (int block = 0; block < blocks; ++block) {
      for (const Task& task : uniep::testing::tasks_of_block(v, stage, block)) {
        bytes += traffic.bytes(v, task, product_size(v, task));
      }
    }
    return bytes;
  }

  const Problem problem{
      .hidden = 256, .intermediate = 512, .num_experts = 2, .topk = 1, .max_tokens = 1024};
  std::optional<RoutingPlan> plan;

  static constexpr double kRows = 2 * 1024 * 256;         // all rows of fc1's input
  static constexpr double kWeights = 2 * 2 * 1024 * 256;  // w1 of both experts
};

TEST_F(TileTraffics, ACacheThatHoldsAllReadsEachOperandOnce) {
  for (const char* s : {"band=0", "raster=along-n,band=0", "band=1"}) {
    EXPECT_DOUBLE_EQ(sum(Pass::kForward, Stage::kFc1, s, 4, 0), kRows + kWeights) << s;
    EXPECT_DOUBLE_EQ(sum(Pass::kForward, Stage::kFc1, s, 4, 1e9), kRows + kWeights) << s;
  }
}

TEST_F(TileTraffics, WithoutACacheTilesShareWhatThoseBesideThemRead) {
  // One worker: each of 8 columns reads the rows again, each of 4 rows the weights.
  EXPECT_DOUBLE_EQ(sum(Pass::kForward, Stage::kFc1, "band=0", 1, 1), 8 * kRows + 4 * kWeights);
  // A column of tiles at a time, then two; a row of tiles at a time.
  EXPECT_DOUBLE_EQ(sum(Pass::kForward, Stage::kFc1, "band=0", 4, 1), 8 * kRows + kWeights);
  EXPECT_DOUBLE_EQ(sum(Pass::kForward, Stage::kFc1, "band=0", 8, 1), 4 * kRows + kWeights);
  EXPECT_DOUBLE_EQ(sum(Pass::kForward, Stage::kFc1, "raster=along-n,band=0", 8, 1),
                   kRows + 4 * kWeights);
  // In bands of one row, all eight of which are at work at a time.
  EXPECT_DOUBLE_EQ(sum(Pass::kForward, Stage::kFc1, "band=1", 8, 1), kRows + 4 * kWeights);
}

TEST_F(TileTraffics, EveryWaveReadsItsExpertsWeights) {
  EXPECT_DOUBLE_EQ(sum(Pass::kForward, Stage::kFc1, "band=0,waves=2", 4, 1e9),
                   kRows + 2 * kWeights);
}

TEST_F(TileTraffics, WeightGradientsAreWritten) {
  // dw1, and what it is the product of: dh and x.
  EXPECT_DOUBLE_EQ(sum(Pass::kBackward, Stage::kWgrad1, "band=0", 4, 1e9),
                   kWeights + 2.0 * 1024 * 1024 + kRows);
}

}  // namespace
}  // namespace uniep::tune
