#include "workload/skew.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "workload/synthetic.h"

namespace uniep::workload {
namespace {

std::vector<std::int64_t> made_up_rows(const std::string& shape, int ranks, std::uint64_t seed,
                                       double skew) {
  const ShapeSpec spec = parse_shape(shape);
  std::vector<std::int64_t> rows(static_cast<std::size_t>(spec.num_experts));
  for (const std::int32_t id : make_routing(spec, ranks, seed, skew).topk_ids) {
    ++rows[static_cast<std::size_t>(id)];
  }
  return rows;
}

TEST(MeasuredSkew, IsThatOfWhatIsMadeUp) {
  for (const char* shape : {"tiny,tokens=500", "small", "qwen3-30b,tokens=2048"}) {
    const int topk = parse_shape(shape).topk;
    for (const double skew : {0.0, 0.3, 0.5, 1.0, 2.0}) {
      EXPECT_NEAR(measured_skew(made_up_rows(shape, 2, 7, skew), topk), skew, 0.11)
          << shape << ", skew " << skew;
    }
  }
}

TEST(MeasuredSkew, DoesNotDependOnTheOrderOfExperts) {
  std::vector<std::int64_t> rows = made_up_rows("small", 2, 3, 0.7);
  const double skew = measured_skew(rows, 4);
  std::ranges::shuffle(rows, std::mt19937_64(1));
  EXPECT_EQ(measured_skew(rows, 4), skew);
}

TEST(MeasuredSkew, OfFewTokensIsNotTheirChance) {
  // Two rows an expert on average: most loads are far from the mean by chance alone.
  EXPECT_LE(measured_skew(made_up_rows("deepseek-v3,tokens=64", 1, 5, 0), 8), 0.3);
}

TEST(MeasuredSkew, IsBetweenItsBounds) {
  EXPECT_EQ(measured_skew(std::vector<std::int64_t>{0, 0, 0, 0}, 1), 0);
  EXPECT_EQ(measured_skew(std::vector<std::int64_t>{5, 5}, 2), 0) << "all experts get all tokens";
  EXPECT_EQ(measured_skew(std::vector<std::int64_t>{8, 8, 8, 8}, 1), 0);
  EXPECT_EQ(measured_skew(std::vector<std::int64_t>{0, 0, 0, 100000, 0, 0, 0, 0}, 1),
            kMostMeasuredSkew);
}

}  // namespace
}  // namespace uniep::workload
