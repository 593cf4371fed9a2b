#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "bench_case.h"
#include "bench_figures.h"
#include "bench_sample.h"
#include "reference/exact.h"
#include "support/expect_error.h"
#include "uniep/communicator.h"

namespace uniep::tool {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

TEST(BenchCase, RowsAreThoseOfTheRouting) {
  const BenchCase bench = make_case("tiny,tokens=9", 2, 3, 1);
  EXPECT_EQ(bench.rows(), 2 * 9 * 2);
  EXPECT_EQ(bench.rows_per_expert.size(), 8u);
  EXPECT_EQ(bench.local_experts(), 4);
  testing::expect_error(ErrorCode::kInvalidArgument,
                        "--shape tiny has 8 experts, which cannot be split over 3 ranks; a number "
                        "of ranks that divides the experts is accepted",
                        [] { make_case("tiny", 3, 0, 0); });
}

TEST(BenchCapacity, IsTwiceTheBalancedLoad) {
  Problem p{.hidden = 8, .intermediate = 8, .num_experts = 4, .topk = 2, .max_tokens = 1000};
  p.row_align = 16;
  EXPECT_EQ(bench_capacity(p, 4, {2000, 2000, 2000, 2000}), 2 * 2000 + 16);
}

TEST(BenchCapacity, HoldsTheFullestRank) {
  Problem p{.hidden = 8, .intermediate = 8, .num_experts = 4, .topk = 2, .max_tokens = 1000};
  p.row_align = 16;
  EXPECT_EQ(bench_capacity(p, 2, {0, 0, 7001, 999}), 7008 + 1008);
}

TEST(BenchCapacity, IsNoMoreThanAnyRoutingNeeds) {
  const Problem p{.hidden = 8, .intermediate = 8, .num_experts = 4, .topk = 2, .max_tokens = 1000};
  EXPECT_EQ(bench_capacity(p, 1, {500, 500, 500, 500}), capacity_rows(p, 1));
}

/// Where the tensors of rank `rank` begin within those of the whole layer.
struct GlobalPlace {
  const std::vector<double>* tensor;
  std::int64_t begin;
};
GlobalPlace place(const reference::ExactResult& all, ResultTensor tensor, int rank, int ranks) {
  const auto part = [&](const std::vector<double>& t) {
    return GlobalPlace{&t, rank * static_cast<std::int64_t>(t.size()) / ranks};
  };
  switch (tensor) {
    case ResultTensor::kOut:
      return part(all.out);
    case ResultTensor::kDx:
      return part(all.dx);
    case ResultTensor::kDprobs:
      return part(all.dprobs);
    case ResultTensor::kDw1:
      return part(all.dw1);
    default:
      return part(all.dw2);
  }
}

TEST(ExactSamples, AreElementsOfTheLayerThatMakeLayerMakes) {
  constexpr int kRanks = 2;
  const std::string shape = "tiny,tokens=11";
  const BenchCase bench = make_case(shape, kRanks, 5, 1);
  const auto all =
      reference::exact(workload::make_layer(workload::parse_shape(shape), kRanks, 5, 1));
  for (int rank = 0; rank < kRanks; ++rank) {
    const std::vector<Sample> samples = exact_samples(bench, rank, true);
    EXPECT_EQ(samples.size(), 5u);
    for (const Sample& sample : samples) {
      const GlobalPlace at = place(all, sample.tensor, rank, kRanks);
      std::size_t next = 0;
      for (const Sample::Run& run : sample.runs) {
        for (std::int64_t i = 0; i < run.count; ++i) {
          const double want = at.tensor->at(static_cast<std::size_t>(at.begin + run.first + i));
          ASSERT_NEAR(sample.exact.at(next++), want, 1e-12 * (1 + std::abs(want)))
              << static_cast<int>(sample.tensor) << " at " << run.first + i;
        }
      }
      EXPECT_EQ(next, sample.exact.size());
      EXPECT_GT(next, 0u);
    }
  }
}

TEST(ExactSamples, OfAForwardPassAreOutAlone) {
  const auto samples = exact_samples(make_case("tiny", 1, 0, 0), 0, false);
  ASSERT_EQ(samples.size(), 1u);
  EXPECT_EQ(samples[0].tensor, ResultTensor::kOut);
  EXPECT_EQ(samples[0].exact.size(), 4u * 64u);
}

TEST(ExactSamples, OfNoTokensAreNone) {
  for (const Sample& sample : exact_samples(make_case("tiny,tokens=0", 1, 0, 0), 0, true)) {
    EXPECT_TRUE(sample.exact.empty());
  }
}

TEST(CountInexact, AllowsPartOfTheLargerOfValueAndMean) {
  const std::vector<double> exact = {1, -1, 0, 1};  // root mean square 0.866
  EXPECT_EQ(count_inexact({1.04, -0.96, 0.04, 1}, exact), 0);
  EXPECT_EQ(count_inexact({1.06, -1, -0.05, 1}, exact), 2);
  EXPECT_EQ(count_inexact({kNan, -1, 0, 1}, exact), 1);
  EXPECT_EQ(count_inexact({0, 0}, {0, 0}), 0);
  EXPECT_EQ(count_inexact({}, {}), 0);
}

/// Two ranks, two passes of 1 and 3 ms on the faster, 5 and 7 ms on the slower.
BenchPass two_ranks() {
  BenchPass measured{.pass = Pass::kForward};
  for (const double first_s : {1e-3, 5e-3}) {
    std::vector<PassStats> passes(2);
    for (std::size_t i = 0; i < passes.size(); ++i) {
      passes[i].elapsed_s = first_s + static_cast<double>(i) * 2e-3;
      passes[i].pulled_bytes = 3'000'000;
      passes[i].pushed_bytes = 9'000'000;
      passes[i][Stage::kDispatch] = {.tasks = 1, .busy_s = 1e-3};
      passes[i][Stage::kFc1] = {.tasks = 1, .busy_s = 2e-3};
    }
    measured.stats.push_back(passes);
  }
  return measured;
}

constexpr std::int64_t kRows = 1000;
workload::ShapeSpec flop_shape() {  // fc1: 2 * 1000 * 500 * 2000 flop, fc2 half of that
  return {
      .name = "", .tokens = 0, .hidden = 500, .intermediate = 1000, .num_experts = 1, .topk = 1};
}

TEST(BenchRows, TimesAreThoseOfTheSlowestRank) {
  const auto rows = bench_rows(two_ranks(), flop_shape(), kRows, std::nullopt);
  ASSERT_EQ(rows.size(), 3u) << "the direction, and stages that ran";
  EXPECT_EQ(rows[0].seconds, (std::vector<double>{5e-3, 7e-3}));
  EXPECT_EQ(rows[1].stage, Stage::kDispatch);
  EXPECT_EQ(rows[2].stage, Stage::kFc1);
}

TEST(BenchRows, RatesAreOfARank) {
  const auto rows = bench_rows(two_ranks(), flop_shape(), kRows, std::nullopt);
  EXPECT_DOUBLE_EQ(*rows[0].tflops, 3e9 / 2 / 6e-3 / 1e12);
  EXPECT_DOUBLE_EQ(*rows[0].gbps, 12e6 / 6e-3 / 1e9);
  EXPECT_DOUBLE_EQ(*rows[1].gbps, 3.0);
  EXPECT_FALSE(rows[1].tflops);
  EXPECT_DOUBLE_EQ(*rows[2].tflops, 2e9 / 2 / 2e-3 / 1e12);
  EXPECT_FALSE(rows[2].gbps);
  for (const BenchRow& row : rows) {
    EXPECT_FALSE(row.floor_s);
    EXPECT_FALSE(row.wrong);
  }
}

TEST(BenchRows, WrongElementsAreTheDirections) {
  BenchPass measured = two_ranks();
  measured.wrong = Wrong{.compared = 100, .differing = 2, .sampled = 10, .inexact = 1};
  const auto rows = bench_rows(measured, flop_shape(), kRows, std::nullopt);
  EXPECT_EQ(rows[0].wrong, 3);
  EXPECT_FALSE(rows[1].wrong);
}

TEST(WireRows, AreWhatTheRoutingSendsOverTheWire) {
  BenchCase bench = make_case("tiny,tokens=2", 2, 0, 0);  // 4 experts a rank, top-2
  bench.routing.topk_ids = {0, 1, 4, 5, /* of rank 1: */ 3, 6, 0, 1};
  const std::vector<WireRows> wire = wire_rows(bench);
  EXPECT_EQ(wire[0], (WireRows{.pulled = 2, .served = 1, .pushed = 3, .returned = 2}));
  EXPECT_EQ(wire[1], (WireRows{.pulled = 1, .served = 2, .pushed = 2, .returned = 3}));
}

TEST(WireRows, AgreeWithThePlansOfTheRanks) {
  const BenchCase bench = make_case("tiny,tokens=13", 4, 7, 1);
  const std::vector<WireRows> wire = wire_rows(bench);
  run_ranks(Communicator::cpu_group(4), [&](Communicator& member) {
    Layer layer(bench.problem, member);
    const std::span ids(bench.routing.topk_ids);
    const Traffic traffic =
        layer.plan(ids.subspan(static_cast<std::size_t>(member.rank()) * 26, 26)).traffic();
    const WireRows& own = wire[static_cast<std::size_t>(member.rank())];
    EXPECT_EQ(own.pulled, traffic.remote_pulls);
    EXPECT_EQ(own.pushed, traffic.remote_rows);
    EXPECT_EQ(bench.rows(member.rank()), traffic.rows);
  });
}

/// Rows of 1 MB each.
Floors floors_of(std::vector<GemmSeconds> gemms, std::vector<WireRows> wire) {
  return {.gemms = std::move(gemms), .wire = std::move(wire), .hidden = 500'000};
}

GemmSeconds forward_gemms(double fc1_s, double fc2_s) {
  GemmSeconds seconds{};
  seconds[static_cast<std::size_t>(Stage::kFc1)] = fc1_s;
  seconds[static_cast<std::size_t>(Stage::kFc2)] = fc2_s;
  return seconds;
}

TEST(Floors, AreTheLongerOfGemmsAndWire) {
  const Floors floors = floors_of({forward_gemms(4e-3, 1e-3), forward_gemms(1e-3, 1e-3)},
                                  {{.pulled = 370, .served = 100, .pushed = 500, .returned = 740},
                                   {.pulled = 100, .served = 370, .pushed = 740, .returned = 500}});
  EXPECT_DOUBLE_EQ(*floors.of(Stage::kDispatch), 1e-3);
  EXPECT_DOUBLE_EQ(*floors.of(Stage::kFc1), 4e-3);
  EXPECT_DOUBLE_EQ(*floors.of(Stage::kFc2), 2e-3);
  EXPECT_FALSE(floors.of(Stage::kReduce));
  EXPECT_DOUBLE_EQ(*floors.of(Pass::kForward), 5e-3);
  EXPECT_DOUBLE_EQ(*floors.of(Pass::kBackward), 3e-3) << "the wire alone, in or out";
}

TEST(Floors, AreOfOneRankWithAllOfItsGemms) {
  const Floors floors = floors_of({forward_gemms(4e-3, 1e-3), forward_gemms(1e-3, 3e-3)}, {{}, {}});
  EXPECT_DOUBLE_EQ(*floors.of(Stage::kFc1), 4e-3);
  EXPECT_DOUBLE_EQ(*floors.of(Stage::kFc2), 3e-3);
  EXPECT_DOUBLE_EQ(*floors.of(Pass::kForward), 5e-3);
}

TEST(Products, CountTheFlopsOfALayer) {
  double forward = 0, backward = 0;
  for (const Product& p : products(flop_shape(), Pass::kForward, kRows)) forward += p.flops();
  for (const Product& p : products(flop_shape(), Pass::kBackward, kRows)) backward += p.flops();
  EXPECT_DOUBLE_EQ(forward, 3e9);
  EXPECT_DOUBLE_EQ(backward, 2 * forward);
}

}  // namespace
}  // namespace uniep::tool
