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
/// for few rows at a time; `any_form`: weights and their gradients in random forms.
template <class Choose>
void check_layers(unsigned first_seed, int count, std::span<const int> numbers_of_ranks,
                  Choose&& choose, bool deferred = false, bool in_ring = false,
                  bool any_form = false) {
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
    LayerData data = uniep::testing::random_layer(rng, ranks, bounds);
    data.combine_groups = 1;  // others are refused: unsupported_reason
    const bool main_grad = uniep::testing::chance(rng, 30);
    const Save save = kSaves[rng() % std::size(kSaves)];
    const bool recompute_h = uniep::testing::chance(rng, 50);
    const std::int64_t backward_rows =
        in_ring ? uniep::testing::ring_rows(data.topk_ids, data.num_experts, Problem{}.row_align,
                                            uniep::testing::pick(rng, 0, 3))
                : 0;
    const auto forms = any_form ? uniep::testing::random_forms(rng, is_gated(data.activation))
                                : uniep::testing::ExpertForms{};
    EmulatedGroup group(data, uniep::testing::random_parts(rng, data.tokens, ranks), main_grad, 1,
                        0, save, recompute_h, backward_rows, forms);
    const Schedule schedule = choose(rng, group.problem());
    const std::string what = cat(
        "seed ", seed, ": ", ranks, " ranks, tokens ", data.tokens, ", hidden ", data.hidden,
        ", intermediate ", data.intermediate, ", experts ", data.num_experts, ", topk ", data.topk,
        ", save ", name(save), ", recompute_h ", recompute_h, ", ", name(data.activation),
        ", probs ", name(data.probs), ", bias ", data.has_bias(), ", backward_rows ", backward_rows,
        ", forms ", uniep::testing::to_string(forms), ", ", to_string(schedule));
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

TEST_F(CudaStages, WeightsMayLieAnywhere) {
  check_layers(5001, cases(120), kRanks, random_cuda_schedule, false, false, true);
}

TEST_F(CudaStages, WeightsMayLieAnywhereInBothParts) {
  check_layers(6001, cases(40), kRanks, random_cuda_schedule, true, false, true);
}

TEST_F(CudaStages, WeightsMayLieAnywhereAtOneRank) {
  check_layers(7001, cases(40), kOne, random_cuda_schedule, false, false, true);
}

/// What a sanitizer can run too: it may run launches one after another, so that those of several
/// ranks could not wait for one another.
TEST_F(CudaStages, RandomSchedulesAtOneRank) {
  check_layers(2001, cases(60), kOne, random_cuda_schedule);
}

}  // namespace
}  // namespace uniep::cuda::testing
