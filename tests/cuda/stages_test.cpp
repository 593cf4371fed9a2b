// The CUDA stages, on one GPU that plays all ranks, against the CPU's contract reference (to
// tolerance) and against themselves at one rank (bit for bit).
#include <gtest/gtest.h>

#include "base/check.h"
#include "base/cuda/driver.h"
#include "cuda/cuda_schedules.h"
#include "cuda/emulated_group.h"
#include "reference/compare.h"
#include "reference/contract.h"
#include "support/cases.h"
#include "support/expect_same.h"
#include "support/random_case.h"
#include "support/ring_rows.h"

namespace uniep::cuda::testing {
namespace {

using uniep::testing::cases;
using uniep::testing::random_cuda_schedule;
using uniep::testing::Rng;

Schedule sequential() { return parse_schedule("sequential,tile_m=128,tile_n=256"); }

class CudaStages : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!device_problem(0).empty()) GTEST_SKIP() << device_problem(0);
  }
};

template <class T>
void expect_close(const std::vector<T>& got, const std::vector<T>& want, const char* tensor,
                  const std::string& what) {
  ASSERT_EQ(got.size(), want.size()) << tensor << ": " << what;
  const double distance = reference::relative_l2(reference::to_double(std::span<const T>(got)),
                                                 reference::to_double(std::span<const T>(want)));
  EXPECT_LT(distance, 3e-3) << tensor << ": " << what;
}

void expect_close(const LayerResult& got, const LayerResult& want, const std::string& what) {
  expect_close(got.out, want.out, "out", what);
  expect_close(got.dx, want.dx, "dx", what);
  expect_close(got.dprobs, want.dprobs, "dprobs", what);
  expect_close(got.dw1, want.dw1, "dw1", what);
  expect_close(got.dw2, want.dw2, "dw2", what);
  expect_close(got.main_dw1, want.main_dw1, "main_dw1", what);
  expect_close(got.main_dw2, want.main_dw2, "main_dw2", what);
  expect_close(got.db1, want.db1, "db1", what);
  expect_close(got.db2, want.db2, "db2", what);
  expect_close(got.main_db1, want.main_db1, "main_db1", what);
  expect_close(got.main_db2, want.main_db2, "main_db2", what);
}

std::vector<float> ones(const std::vector<bf16>& like) {
  return std::vector<float>(like.size(), 1);
}

constexpr int kRanks[] = {1, 2, 3, 4, 8};

constexpr int kOne[] = {1};

/// Random layers: close to the CPU's reference, and the same bits at one rank with `sequential` as
/// at any number of ranks with the schedule that choose(rng, problem) gives; `deferred`: with
/// weight gradients in a part of their own, under another schedule; `in_ring`: backward with room
/// for few rows at a time.
template <class Choose>
void check_layers(unsigned first_seed, int count, std::span<const int> numbers_of_ranks,
                  Choose&& choose, bool deferred = false, bool in_ring = false) {
  for (unsigned seed = first_seed; seed < first_seed + static_cast<unsigned>(count); ++seed) {
    Rng rng(seed);
    const auto last = static_cast<std::int64_t>(numbers_of_ranks.size()) - 1;
    const int ranks =
        numbers_of_ranks[static_cast<std::size_t>(uniep::testing::pick(rng, 0, last))];
    const uniep::testing::LayerBounds bounds{
        .max_tokens = seed % 3 == 0 ? 700 : 90,
        .max_hidden = seed % 2 == 0 ? 600 : 96,
        .max_intermediate = seed % 2 == 0 ? 600 : 96,
        .any_arithmetic = uniep::testing::chance(rng, 60) && !in_ring};
    const LayerData data = uniep::testing::random_layer(rng, ranks, bounds);
    const bool main_grad = uniep::testing::chance(rng, 30);
    const Save save = kSaves[rng() % std::size(kSaves)];
    const bool recompute_h = uniep::testing::chance(rng, 50);
    const std::int64_t backward_rows =
        in_ring ? uniep::testing::ring_rows(data.topk_ids, data.num_experts, Problem{}.row_align,
                                            uniep::testing::pick(rng, 0, 3))
                : 0;
    EmulatedGroup group(data, uniep::testing::random_parts(rng, data.tokens, ranks), main_grad, 1,
                        0, save, recompute_h, backward_rows);
    const Schedule schedule = choose(rng, group.problem());
    const std::string what =
        cat("seed ", seed, ": ", ranks, " ranks, tokens ", data.tokens, ", hidden ", data.hidden,
            ", intermediate ", data.intermediate, ", experts ", data.num_experts, ", topk ",
            data.topk, ", save ", name(save), ", recompute_h ", recompute_h, ", ",
            name(data.activation), ", probs ", name(data.probs), ", bias ", data.has_bias(),
            ", combine groups ", data.combine_groups, " in ", name(data.combine_partials),
            ", backward_rows ", backward_rows, ", ", to_string(schedule));
    SCOPED_TRACE(what);
    const LayerResult got = deferred ? group.deferred_step(schedule, choose(rng, group.problem()))
                                     : group.step(schedule);
    const LayerResult want =
        main_grad ? reference::contract_into_main_grad(data, ones(data.w1), ones(data.w2),
                                                       ones(data.b1), ones(data.b2))
                  : reference::contract(data);
    expect_close(got, want, what);
    EmulatedGroup one(data, {0, data.tokens}, main_grad, 1);
    uniep::testing::expect_same_bits(got, one.step(sequential()), what);
    if (::testing::Test::HasFailure()) return;
  }
}

TEST_F(CudaStages, RandomLayersAtAnyNumberOfRanks) {
  check_layers(1, cases(60), kRanks, [](Rng&, const Problem&) { return sequential(); });
}

TEST_F(CudaStages, RandomSchedules) {
  check_layers(1001, cases(200), kRanks, random_cuda_schedule);
}

TEST_F(CudaStages, DeferredWeightsUnderRandomSchedules) {
  check_layers(3001, cases(60), kRanks, random_cuda_schedule, true);
}

TEST_F(CudaStages, ExpertsTakeTurnsInARingOfRows) {
  check_layers(4001, cases(100), kRanks, random_cuda_schedule, false, true);
}

/// Experts with biases and near 4000 rows each: both kinds of sums that senders make beside the
/// products then take many times more steps than the pipeline has slots.
LayerData with_long_sums(Rng& rng, int experts, std::int64_t hidden, std::int64_t intermediate) {
  LayerData d;
  d.tokens = 4000;
  d.hidden = hidden;
  d.intermediate = intermediate;
  d.num_experts = d.topk = experts;
  d.activation = Activation::kGptOss;
  d.x = uniep::testing::random_bf16(rng, d.tokens * hidden, 1);
  d.dy = uniep::testing::random_bf16(rng, d.tokens * hidden, 1);
  d.w1 = uniep::testing::random_bf16(rng, experts * d.w1_rows() * hidden, 0.1f);
  d.w2 = uniep::testing::random_bf16(rng, experts * hidden * intermediate, 0.1f);
  d.b1 = uniep::testing::random_bf16(rng, experts * d.w1_rows(), 1);
  d.b2 = uniep::testing::random_bf16(rng, experts * hidden, 1);
  for (std::int64_t slot = 0; slot < d.tokens * d.topk; ++slot) {
    const bool dropped = uniep::testing::chance(rng, 1);
    d.topk_ids.push_back(dropped ? -1 : static_cast<std::int32_t>(slot % experts));
    d.topk_probs.push_back(0.05f + 0.01f * static_cast<float>(slot % 90));
  }
  return d;
}

/// The same bits under random schedules at `ranks` ranks as at one.
void check_long_sums(Rng& rng, const LayerData& data, int ranks, bool main_grad) {
  EmulatedGroup one(data, {0, data.tokens}, main_grad, 1);
  const LayerResult want = one.step(sequential());
  EmulatedGroup group(data, uniep::testing::random_parts(rng, data.tokens, ranks), main_grad, 1);
  for (int i = 0; i < cases(10); ++i) {
    const Schedule schedule = random_cuda_schedule(rng, group.problem());
    const std::string what = cat("main_grad ", main_grad, ", step ", i, ": ", to_string(schedule));
    uniep::testing::expect_same_bits(group.step(schedule), want, what);
    if (::testing::Test::HasFailure()) return;
  }
}

TEST_F(CudaStages, LongSumsOfBiases) {
  Rng rng(5001);
  const LayerData data = with_long_sums(rng, 2, 584, 40);
  EmulatedGroup group(data, {0, data.tokens}, false, 1);
  expect_close(group.step(sequential()), reference::contract(data), "sequential");
  for (const bool main_grad : {false, true}) check_long_sums(rng, data, 1, main_grad);
}

/// Few workers a rank, so that each takes many tiles with and without such sums, one after another.
TEST_F(CudaStages, LongSumsOfBiasesAtManyRanks) {
  Rng rng(5002);
  LayerData data = with_long_sums(rng, 8, 392, 264);
  data.probs = Probs::kAfter;
  for (const bool main_grad : {false, true}) check_long_sums(rng, data, 8, main_grad);
}

/// What a sanitizer can run too: it may run launches one after another, so that those of several
/// ranks could not wait for one another.
TEST_F(CudaStages, RandomSchedulesAtOneRank) {
  check_layers(2001, cases(60), kOne, random_cuda_schedule);
}

}  // namespace
}  // namespace uniep::cuda::testing
