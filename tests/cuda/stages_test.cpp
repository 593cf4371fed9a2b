// The CUDA stages, on one GPU that plays all ranks, against the CPU's contract reference (to
// tolerance, and bit for bit where products are exact) and against themselves at one rank (bit for
// bit).
#include <gtest/gtest.h>

#include <cmath>

#include "base/check.h"
#include "base/cuda/driver.h"
#include "cuda/cuda_schedules.h"
#include "cuda/emulated_group.h"
#include "reference/compare.h"
#include "reference/contract.h"
#include "support/cases.h"
#include "support/expect_same.h"
#include "support/gathered_order.h"
#include "support/random_case.h"
#include "support/ring_rows.h"
#include "support/shared_layer.h"

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
  expect_close(got.dshared_probs, want.dshared_probs, "dshared_probs", what);
}

/// Weight gradients of shared experts are those of a layer of each rank's tokens alone.
void set_shared_gradients(LayerResult& want, const LayerData& data,
                          std::span<const std::int64_t> parts, bool main_grad) {
  const auto append = [](auto& to, const auto& from) {
    to.insert(to.end(), from.begin(), from.end());
  };
  want.dshared_w1.clear(), want.dshared_w2.clear();
  want.main_dshared_w1.clear(), want.main_dshared_w2.clear();
  for (std::size_t r = 0; r + 1 < parts.size(); ++r) {
    const LayerData part = uniep::testing::shared_layer_of(data, parts[r], parts[r + 1]);
    EmulatedGroup one(part, {0, part.tokens}, main_grad, 1);
    const LayerResult of_rank = one.step(sequential());
    append(want.dshared_w1, of_rank.dw1);
    append(want.dshared_w2, of_rank.dw2);
    append(want.main_dshared_w1, of_rank.main_dw1);
    append(want.main_dshared_w2, of_rank.main_dw2);
  }
}

std::vector<float> ones(const std::vector<bf16>& like) {
  return std::vector<float>(like.size(), 1);
}

constexpr int kRanks[] = {1, 2, 3, 4, 8};

constexpr int kOne[] = {1};

LayerResult reference_of(const LayerData& data, bool main_grad) {
  if (!main_grad) return reference::contract(data);
  return reference::contract_into_main_grad(data, ones(data.w1), ones(data.w2), ones(data.b1),
                                            ones(data.b2));
}

/// Random layers: close to the CPU's reference, and the same bits at one rank with `sequential` as
/// at any number of ranks with the schedule that choose(rng, problem) gives; `deferred`: with
/// weight gradients in a part of their own, under another schedule; `in_ring`: backward with room
/// for few rows at a time; `any_form`: weights and their gradients in random forms, of which only
/// the bits are compared.
template <class Choose>
void check_layers(unsigned first_seed, int count, std::span<const int> numbers_of_ranks,
                  Choose&& choose, bool deferred = false, bool in_ring = false,
                  bool any_form = false) {
  for (unsigned seed = first_seed; seed < first_seed + static_cast<unsigned>(count); ++seed) {
    Rng rng(seed);
    const auto last = static_cast<std::int64_t>(numbers_of_ranks.size()) - 1;
    const int ranks =
        numbers_of_ranks[static_cast<std::size_t>(uniep::testing::pick(rng, 0, last))];
    const bool any_arithmetic = uniep::testing::chance(rng, 60);
    const uniep::testing::LayerBounds bounds{.max_tokens = seed % 3 == 0 ? 700 : 90,
                                             .max_hidden = seed % 2 == 0 ? 600 : 96,
                                             .max_intermediate = seed % 2 == 0 ? 600 : 96,
                                             .any_arithmetic = any_arithmetic,
                                             .shared_experts = any_arithmetic};
    const LayerData data = uniep::testing::random_layer(rng, ranks, bounds);
    const std::vector<std::int64_t> parts = uniep::testing::random_parts(rng, data.tokens, ranks);
    std::int64_t shared_rows = 0;
    for (std::size_t r = 0; data.shared_experts > 0 && r + 1 < parts.size(); ++r) {
      shared_rows = std::max(shared_rows, parts[r + 1] - parts[r]);
    }
    const bool main_grad = uniep::testing::chance(rng, 30);
    const Save save = kSaves[rng() % std::size(kSaves)];
    const bool recompute_h = uniep::testing::chance(rng, 50);
    const std::int64_t backward_rows =
        in_ring ? uniep::testing::ring_rows(data.topk_ids, data.num_experts, Problem{}.row_align,
                                            uniep::testing::pick(rng, 0, 3), shared_rows)
                : 0;
    const auto forms = any_form ? uniep::testing::mapped(
                                      uniep::testing::random_forms(rng, is_gated(data.activation)),
                                      data.intermediate)
                                : uniep::testing::ExpertForms{};
    const bool gathered = uniep::testing::chance(rng, 30);
    const int hosts = gathered ? static_cast<int>(uniep::testing::pick(rng, 2, 5)) : 1;
    const auto first_host = static_cast<int>(uniep::testing::pick(rng, -1, hosts - 1));
    const bool slot_rows = data.shared_experts == 0 && uniep::testing::chance(rng, 25);
    EmulatedGroup group(data, parts, main_grad, 1, 0, save, recompute_h, backward_rows, forms,
                        hosts, first_host, slot_rows);
    const Schedule schedule = choose(rng, group.problem());
    const std::string what = cat(
        "seed ", seed, ": ", ranks, " ranks, tokens ", data.tokens, ", hidden ", data.hidden,
        ", intermediate ", data.intermediate, ", experts ", data.num_experts, ", topk ", data.topk,
        ", save ", name(save), ", recompute_h ", recompute_h, ", ", name(data.activation),
        ", probs ", name(data.probs), ", bias ", data.has_bias(), ", combine groups ",
        data.combine_groups, " in ", name(data.combine_partials), ", shared experts ",
        data.shared_experts, data.shared_probs.empty() ? "" : " with probabilities",
        ", backward_rows ", backward_rows, ", gathered hosts ", hosts, " from ", first_host,
        slot_rows ? ", rows of slots" : "", ", forms ", uniep::testing::to_string(forms), ", ",
        to_string(schedule));
    SCOPED_TRACE(what);
    const LayerResult got = deferred ? group.deferred_step(schedule, choose(rng, group.problem()))
                                     : group.step(schedule);
    if (!any_form) expect_close(got, reference_of(data, main_grad), what);
    EmulatedGroup one(data, {0, data.tokens}, main_grad, 1);
    LayerResult want = one.step(sequential());
    if (hosts > 1) {
      const LayerData ordered = uniep::testing::in_gathered_order(data, parts, hosts);
      EmulatedGroup of_ordered(ordered, {0, data.tokens}, main_grad, 1);
      LayerResult in_order = of_ordered.step(sequential());
      uniep::testing::take_weight_grads(in_order, want);
    }
    if (data.shared_experts > 0) set_shared_gradients(want, data, parts, main_grad);
    uniep::testing::expect_same_bits(got, want, what);
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

std::vector<bf16> random_signs(Rng& rng, std::int64_t count) {
  std::vector<bf16> values(static_cast<std::size_t>(count));
  for (bf16& v : values) v = to_bf16(static_cast<float>(uniep::testing::pick(rng, -1, 1)));
  return values;
}

/// A layer whose products have sums of small whole numbers, exact in any order, so that rows have
/// the same bits on CPUs and GPUs. Of a token's rows two are large and may cancel: what is added in
/// between loses bits that other orders keep.
LayerData with_exact_rows(Rng& rng) {
  LayerData d;
  d.tokens = 300;
  d.hidden = 40;
  d.intermediate = 24;
  d.num_experts = 8;
  d.topk = 6;
  d.activation = Activation::kReglu;
  d.x = random_signs(rng, d.tokens * d.hidden);
  d.dy = random_signs(rng, d.tokens * d.hidden);
  d.w1 = random_signs(rng, d.num_experts * d.w1_rows() * d.hidden);
  d.w2 = random_signs(rng, d.num_experts * d.hidden * d.intermediate);
  for (std::int64_t t = 0; t < d.tokens; ++t) {
    const auto large = static_cast<std::int32_t>(uniep::testing::pick(rng, 0, d.num_experts - 1));
    for (int k = 0; k < d.topk; ++k) {
      const auto other =
          static_cast<std::int32_t>(uniep::testing::pick(rng, -1, d.num_experts - 1));
      d.topk_ids.push_back(k == 0 || k == 3 ? large : other);
      d.topk_probs.push_back(std::ldexp(k == 3 ? -1.0f : 1.0f, k == 0 || k == 3 ? 18 : -k));
    }
  }
  return d;
}

TEST_F(CudaStages, CombineGroupsHaveTheBitsOfTheReference) {
  Rng rng(4501);
  LayerData data = with_exact_rows(rng);
  for (const Probs probs : {Probs::kBefore, Probs::kAfter}) {
    for (const int groups : {1, 2, 4, 8}) {
      for (const CombinePartials partials : {CombinePartials::kFp32, CombinePartials::kBf16}) {
        data.probs = probs;
        data.combine_groups = groups;
        data.combine_partials = partials;
        const std::string what = cat("probs ", name(probs), ", ", groups, " in ", name(partials));
        SCOPED_TRACE(what);
        const LayerResult want = reference::contract(data);
        for (const int ranks : {1, 4}) {
          EmulatedGroup group(data, uniep::testing::random_parts(rng, data.tokens, ranks), false,
                              1);
          const LayerResult got = group.step(random_cuda_schedule(rng, group.problem()));
          uniep::testing::expect_same_bits(got.out, want.out, "out", what);
          uniep::testing::expect_same_bits(got.dx, want.dx, "dx", what);
        }
      }
    }
  }
}

/// Large rows that cancel are now those of shared experts, too: other orders, or a sum that is not
/// rounded before they join it, give other bits.
TEST_F(CudaStages, SharedExpertsHaveTheBitsOfTheReference) {
  Rng rng(4601);
  LayerData data = with_exact_rows(rng);
  for (const int shared : {1, 2, 3}) {
    data.shared_experts = shared;
    data.shared_w1 = random_signs(rng, shared * data.w1_rows() * data.hidden);
    data.shared_w2 = random_signs(rng, shared * data.hidden * data.intermediate);
    for (const Probs probs : {Probs::kBefore, Probs::kAfter}) {
      for (const bool gate : {false, true}) {
        data.probs = probs;
        data.shared_probs.clear();
        for (std::int64_t i = 0; gate && i < data.tokens * shared; ++i) {
          data.shared_probs.push_back(
              std::ldexp(1.0f, static_cast<int>(uniep::testing::pick(rng, -6, 18))));
        }
        const std::string what = cat("probs ", name(probs), ", ", shared, " gate ", gate);
        SCOPED_TRACE(what);
        const LayerResult want = reference::contract(data);
        for (const int ranks : {1, 4}) {
          EmulatedGroup group(data, uniep::testing::random_parts(rng, data.tokens, ranks), false,
                              1);
          const LayerResult got = group.step(random_cuda_schedule(rng, group.problem()));
          uniep::testing::expect_same_bits(got.out, want.out, "out", what);
          uniep::testing::expect_same_bits(got.dx, want.dx, "dx", what);
        }
      }
    }
  }
}

/// Experts with biases and near 4000 rows each: both kinds of sums that senders make beside the
/// products then take many times more steps than the pipeline has slots. Products are exact, as in
/// with_exact_rows, but for their probabilities.
LayerData with_long_sums(Rng& rng, int experts, std::int64_t hidden, std::int64_t intermediate) {
  LayerData d;
  d.tokens = 4000;
  d.hidden = hidden;
  d.intermediate = intermediate;
  d.num_experts = d.topk = experts;
  d.activation = Activation::kReglu;
  d.x = random_signs(rng, d.tokens * hidden);
  d.dy = random_signs(rng, d.tokens * hidden);
  d.w1 = random_signs(rng, experts * d.w1_rows() * hidden);
  d.w2 = random_signs(rng, experts * hidden * intermediate);
  d.b1 = random_signs(rng, experts * d.w1_rows());
  d.b2 = random_signs(rng, experts * hidden);
  std::uniform_real_distribution<float> probability(0.01f, 1.0f);
  for (std::int64_t slot = 0; slot < d.tokens * d.topk; ++slot) {
    const bool dropped = uniep::testing::chance(rng, 1);
    d.topk_ids.push_back(dropped ? -1 : static_cast<std::int32_t>(slot % experts));
    d.topk_probs.push_back(probability(rng));
  }
  return d;
}

/// The same bits under random schedules at `ranks` ranks as at one.
void check_long_sums(Rng& rng, const LayerData& data, int ranks, bool main_grad) {
  EmulatedGroup one(data, {0, data.tokens}, main_grad, 1);
  const LayerResult want = one.step(sequential());
  for (int i = 0; i < cases(10); ++i) {
    // Of one step, whose main gradients are added to what they begin with.
    EmulatedGroup group(data, uniep::testing::random_parts(rng, data.tokens, ranks), main_grad, 1);
    const Schedule schedule = random_cuda_schedule(rng, group.problem());
    const std::string what = cat("main_grad ", main_grad, ", step ", i, ": ", to_string(schedule));
    uniep::testing::expect_same_bits(group.step(schedule), want, what);
    if (::testing::Test::HasFailure()) return;
  }
}

/// Of exact rows bias gradients have the reference's bits.
void expect_same_biases(const LayerResult& got, const LayerResult& want, const std::string& what) {
  uniep::testing::expect_same_bits(got.db1, want.db1, "db1", what);
  uniep::testing::expect_same_bits(got.db2, want.db2, "db2", what);
  uniep::testing::expect_same_bits(got.main_db1, want.main_db1, "main_db1", what);
  uniep::testing::expect_same_bits(got.main_db2, want.main_db2, "main_db2", what);
}

TEST_F(CudaStages, LongSumsOfBiases) {
  Rng rng(5001);
  LayerData data = with_long_sums(rng, 2, 584, 40);
  for (const bool main_grad : {false, true}) {
    data.probs = main_grad ? Probs::kBefore : Probs::kAfter;
    const LayerResult want = reference_of(data, main_grad);
    EmulatedGroup group(data, {0, data.tokens}, main_grad, 1);
    const LayerResult got = group.step(sequential());
    expect_same_biases(got, want, cat("main_grad ", main_grad));
    expect_close(got, want, cat("main_grad ", main_grad));
    check_long_sums(rng, data, 1, main_grad);
  }
}

/// Few workers a rank, so that each takes many tiles with and without such sums, one after another.
TEST_F(CudaStages, LongSumsOfBiasesAtManyRanks) {
  Rng rng(5002);
  const LayerData data = with_long_sums(rng, 8, 392, 264);
  for (const bool main_grad : {false, true}) check_long_sums(rng, data, 8, main_grad);
}

/// What a sanitizer can run too: it may run launches one after another, so that those of several
/// ranks could not wait for one another.
TEST_F(CudaStages, RandomSchedulesAtOneRank) {
  check_layers(2001, cases(60), kOne, random_cuda_schedule);
}

}  // namespace
}  // namespace uniep::cuda::testing
