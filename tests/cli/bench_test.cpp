#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>

#include "base/activation_names.h"
#include "base/check.h"
#include "bench/bench_against.h"
#include "bench/bench_case.h"
#include "bench/bench_figures.h"
#include "bench/bench_sample.h"
#include "bench/bench_summary.h"
#include "reference/exact.h"
#include "run/shared_layer.h"
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
    case ResultTensor::kDb1:
      return part(all.db1);
    case ResultTensor::kDb2:
      return part(all.db2);
    case ResultTensor::kDsharedProbs:
      return part(all.dshared_probs);
    case ResultTensor::kDsharedW1:
      return part(all.dshared_w1);
    case ResultTensor::kDsharedW2:
      return part(all.dshared_w2);
    default:
      return part(all.dw2);
  }
}

/// Compares what is sampled of each rank with the reference.
void expect_exact(const BenchCase& bench, const reference::ExactResult& all, std::size_t tensors) {
  for (int rank = 0; rank < bench.ranks; ++rank) {
    const std::vector<Sample> samples = exact_samples(bench, rank, true);
    EXPECT_EQ(samples.size(), tensors);
    for (const Sample& sample : samples) {
      const GlobalPlace at = place(all, sample.tensor, rank, bench.ranks);
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

TEST(ExactSamples, AreElementsOfTheLayerThatMakeLayerMakes) {
  constexpr int kRanks = 2;
  for (const std::string& activation : all_activation_names()) {
    for (const bool more : {false, true}) {
      SCOPED_TRACE(cat(activation, more ? ", after, bias" : ""));
      const ArithmeticFlags arithmetic{
          .activation = activation, .probs = more ? "after" : "before", .bias = more};
      const BenchCase bench = make_case("tiny,tokens=11", kRanks, 5, 1, arithmetic);
      const auto all = reference::exact(workload::make_layer(bench.spec, kRanks, 5, 1));
      expect_exact(bench, all, more ? 7 : 5);
    }
  }
}

TEST(ExactSamples, OfSharedExpertsToo) {
  for (const bool gate : {false, true}) {
    for (const int ranks : {1, 2}) {
      SCOPED_TRACE(cat(gate ? "gate, " : "", ranks, " ranks"));
      const BenchCase bench =
          make_case("tiny,tokens=11", ranks, 5, 1,
                    {.probs = "after", .shared_experts = 2, .shared_gate = gate});
      const LayerData layer = workload::make_layer(bench.spec, ranks, 5, 1);
      auto all = reference::exact(layer);
      all.dshared_w1.clear(), all.dshared_w2.clear();
      for (const LayerData& of_rank : shared_layers(layer, ranks)) {
        const auto part = reference::exact(of_rank);
        all.dshared_w1.insert(all.dshared_w1.end(), part.dw1.begin(), part.dw1.end());
        all.dshared_w2.insert(all.dshared_w2.end(), part.dw2.begin(), part.dw2.end());
      }
      expect_exact(bench, all, 8);
    }
  }
}

TEST(BenchCase, SharedExpertsHaveEveryTokenOfTheirRank) {
  const BenchCase without = make_case("tiny,tokens=9,topk=1", 2, 3, 1);
  const BenchCase bench = make_case("tiny,tokens=9,topk=1", 2, 3, 1, {.shared_experts = 2});
  EXPECT_EQ(bench.rows(), without.rows() + 2 * 2 * 9);
  EXPECT_EQ(bench.padded_rows(1), without.padded_rows(1) + 2 * 128);
  EXPECT_GE(bench.received_tokens(0), 9);
  EXPECT_GT(bench.received_tokens(0), without.received_tokens(0));
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

Sample sample_of(std::vector<double> exact, std::vector<double> terms = {}) {
  return {.tensor = ResultTensor::kOut, .exact = std::move(exact), .terms = std::move(terms)};
}

TEST(CountInexact, AllowsPartOfTheLargerOfValueAndMean) {
  const Sample sample = sample_of({1, -1, 0, 1});  // root mean square 0.866
  EXPECT_EQ(count_inexact({1.04, -0.96, 0.04, 1}, sample), 0);
  EXPECT_EQ(count_inexact({1.06, -1, -0.05, 1}, sample), 2);
  EXPECT_EQ(count_inexact({kNan, -1, 0, 1}, sample), 1);
  EXPECT_EQ(count_inexact({0, 0}, sample_of({0, 0})), 0);
  EXPECT_EQ(count_inexact({}, sample_of({})), 0);
}

TEST(CountInexact, AllowsPartOfWhatCancels) {
  EXPECT_EQ(count_inexact({0.01, 0.04}, sample_of({0, 0}, {0.1, 1})), 1);
}

TEST(ExactSamples, OfFewProbabilitiesAreJudgedByTheirTerms) {
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    const auto samples = exact_samples(make_case("tiny,tokens=1,topk=1", 1, seed, 0), 0, true);
    const Sample& dprobs = samples[2];
    ASSERT_EQ(dprobs.tensor, ResultTensor::kDprobs);
    ASSERT_EQ(dprobs.terms.size(), dprobs.exact.size());
    // 32 terms: their sum is seldom more than a few times their root of squares.
    EXPECT_LT(std::abs(dprobs.exact[0]), 6 * dprobs.terms[0]);
    EXPECT_GT(dprobs.terms[0], 0);
  }
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

/// As in a layer that keeps no rows of x: redispatch moves as much as dispatch.
TEST(BenchRows, StagesThatPullShareTheBytes) {
  BenchPass measured = two_ranks();
  measured.pass = Pass::kBackward;
  for (std::vector<PassStats>& passes : measured.stats) {
    for (PassStats& stats : passes) stats[Stage::kRedispatch] = {.tasks = 1, .busy_s = 1e-3};
  }
  const auto rows = bench_rows(measured, flop_shape(), kRows, std::nullopt);
  ASSERT_EQ(rows.size(), 4u);
  for (const BenchRow& row : rows) {
    if (!row.stage || *row.stage == Stage::kFc1) continue;
    EXPECT_DOUBLE_EQ(*row.gbps, 1.5) << name(*row.stage);
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

TEST(Products, LieAsTheirWeightsDo) {
  const auto of = [](Pass pass) { return products(flop_shape(), pass, kRows, {.drops_h = true}); };
  for (const Product& p : of(Pass::kForward)) EXPECT_EQ(p.layout, ProductLayout::kNT);
  std::map<Stage, Product> backward;
  for (const Product& p : of(Pass::kBackward)) backward.insert({p.stage, p});
  ASSERT_EQ(backward.size(), 5u);
  const Product& again = backward.at(Stage::kRefc1);
  EXPECT_EQ(again.layout, ProductLayout::kNT);
  EXPECT_DOUBLE_EQ(again.flops(), of(Pass::kForward)[0].flops()) << "what fc1 has computed";
  EXPECT_EQ(backward.at(Stage::kDfc2).layout, ProductLayout::kNN);
  EXPECT_EQ(backward.at(Stage::kDfc1).layout, ProductLayout::kNN);
  for (const Stage stage : {Stage::kWgrad2, Stage::kWgrad1}) {
    EXPECT_EQ(backward.at(stage).layout, ProductLayout::kTN);
    EXPECT_EQ(backward.at(stage).k, kRows);
  }
}

/// A layer measured under schedules that take so many seconds, [schedule][direction].
BenchEntry measured(const std::vector<std::vector<double>>& seconds) {
  BenchEntry entry{.bench = {}, .report = {}};
  for (const std::vector<double>& directions : seconds) {
    auto& passes = entry.report.schedules.emplace_back();
    for (std::size_t d = 0; d < directions.size(); ++d) {
      PassStats stats;
      stats.elapsed_s = directions[d];
      passes.push_back({.pass = d == 0 ? Pass::kForward : Pass::kBackward, .stats = {{stats}}});
    }
  }
  return entry;
}

BenchOptions schedules_given(const std::vector<std::string>& names) {
  BenchOptions options;
  for (const std::string& name : names) options.schedules.push_back({name, std::nullopt});
  return options;
}

TEST(FastestText, ComparesTheFastestWithTheFirst) {
  const auto options = schedules_given({"sequential", "single", "auto"});
  EXPECT_EQ(fastest_text({measured({{2, 6}, {1, 3}, {3, 4}})}, options),
            "fastest: single, 2.00x sequential forward, 2.00x backward");
  EXPECT_EQ(fastest_text({measured({{2}, {1}, {3}}), measured({{2}, {4}, {0.125}})}, options),
            "fastest: auto, 3.27x sequential forward (geometric mean over 2 shapes)");
}

TEST(FastestText, ComparesTheFirstWithTheNext) {
  EXPECT_EQ(fastest_text({measured({{1, 1}, {3, 2}, {2, 3}})}, schedules_given({"a", "b", "c"})),
            "fastest: a, 2.00x c forward, 2.00x b backward");
}

TEST(FastestText, NamesOneForEachDirectionWhereTheyDiffer) {
  EXPECT_EQ(fastest_text({measured({{1, 3}, {2, 1}})}, schedules_given({"a", "b"})),
            "fastest: a forward, 2.00x b; b backward, 3.00x a");
}

TEST(FastestText, NumbersWhatIsLongOrGivenTwice) {
  const std::string name(25, 'x');
  EXPECT_EQ(fastest_text({measured({{2}, {1}})}, schedules_given({"a", name})),
            "fastest: schedule 1, 2.00x a forward");
  EXPECT_EQ(fastest_text({measured({{2}, {1}})}, schedules_given({"a", "a"})),
            "fastest: schedule 1, 2.00x schedule 0 forward");
}

TEST(FastestText, NeedsTwoThatWereMeasured) {
  EXPECT_EQ(fastest_text({measured({{1, 1}})}, schedules_given({"a"})), "");
  EXPECT_EQ(fastest_text({}, schedules_given({"a", "b"})), "");
  EXPECT_EQ(fastest_text({measured({{1, 1}, {}})}, schedules_given({"a", "b"})), "");
  // Interrupted in the second one's backward pass.
  EXPECT_EQ(fastest_text({measured({{2, 1}, {1}})}, schedules_given({"a", "b"})),
            "fastest: b, 2.00x a forward");
}

TEST(BenchCase, OfUnevenTokensKnowsWhoseTheyAre) {
  BenchCase bench;
  bench.ranks = 3;
  bench.token_begin = {0, 0, 2, 5};
  EXPECT_EQ(bench.tokens_per_rank(), (std::vector<std::int64_t>{0, 2, 3}));
  for (std::int64_t token = 0; token < 5; ++token)
    EXPECT_EQ(bench.rank_of(token), token < 2 ? 1 : 2);
}

/// A case of 10 passes whose 10th and 90th percentile are so far from the median.
ResultFile result(double ms, double spread, const std::string& schedule = "lag=1") {
  ResultFile file;
  file.results.push_back({.shape = "tiny",
                          .direction = "forward",
                          .given = "single",
                          .schedule = schedule,
                          .passes = 10,
                          .ms = ms,
                          .p10 = ms - spread,
                          .p90 = ms + spread});
  return file;
}

Change change_of(const ResultFile& earlier, const ResultFile& now) {
  const BenchComparison comparison = compare_results(earlier, now);
  EXPECT_EQ(comparison.cases.size(), 1u);
  return comparison.cases.front().change;
}

TEST(CompareResults, IsAChangeWhereItIsMoreThanTheSpreadOfBoth) {
  EXPECT_EQ(change_of(result(10, 0.3), result(10.6, 0.4)), Change::kSlower);  // noise 0.5
  EXPECT_EQ(change_of(result(10, 0.3), result(9.4, 0.4)), Change::kFaster);
  EXPECT_EQ(change_of(result(10, 0.3), result(10.4, 0.4)), Change::kNoise);
  EXPECT_EQ(change_of(result(10, 0.3), result(9.6, 0.4)), Change::kNoise);
  const ComparedCase c = compare_results(result(10, 0.3), result(20, 0.4)).cases.front();
  EXPECT_DOUBLE_EQ(c.ratio, 2);
  EXPECT_NEAR(*c.noise, 0.05, 1e-12);
}

TEST(CompareResults, CountsWhatIsSlowerByMoreThanSoMuch) {
  const BenchComparison comparison = compare_results(result(10, 0.1), result(12, 0.1));
  EXPECT_EQ(comparison.slower_than(19), 1u);
  EXPECT_EQ(comparison.slower_than(21), 0u);
  EXPECT_EQ(compare_results(result(10, 5), result(12, 5)).slower_than(0), 0u) << "noise";
  EXPECT_EQ(compare_results(result(12, 0.1), result(10, 0.1)).slower_than(0), 0u);
}

TEST(CompareResults, PairsEachCaseOnce) {
  ResultFile earlier = result(1, 0, "lag=1"), now = result(1, 0, "lag=2");
  EXPECT_EQ(compare_results(earlier, now).cases.size(), 1u) << "given alike";
  now.results.push_back(now.results.front());
  const BenchComparison comparison = compare_results(earlier, now);
  EXPECT_EQ(comparison.cases.size(), 1u);
  EXPECT_EQ(comparison.only_now.size(), 1u);
  earlier.results.front().given.clear();
  EXPECT_EQ(compare_results(earlier, now).cases.size(), 0u) << "another schedule in full";
  now = earlier;
  now.results.front().arithmetic = "gpt_oss,after,bias";
  EXPECT_EQ(compare_results(earlier, now).cases.size(), 0u) << "other experts";
}

}  // namespace
}  // namespace uniep::tool
