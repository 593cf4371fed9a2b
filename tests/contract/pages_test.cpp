// Saved rows in pages of a row pool: the bits are those of memory of their own, and memory follows
// the rows that came.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "contract/contract_testing.h"
#include "cpu/row_pool.h"
#include "layout/page_pool.h"
#include "support/cases.h"
#include "support/layer_group.h"

namespace uniep::testing {
namespace {

constexpr const char* kPresets[] = {"sequential", "pipelined:2", "two-kernel", "single"};

/// Of every choice of what is kept, with weight gradients in the pass and in one of their own.
void expect_same_bits_whatever_is_kept(const LayerData& data, int ranks, const char* preset) {
  for (const Save save : kSaves) {
    for (const bool recompute_h : {false, true}) {
      for (const bool defer_weights : {false, true}) {
        RunOptions o;
        o.token_begin = workload::even_parts(data.tokens, ranks);
        o.forward_schedule = parse_schedule(cat(preset, ",tile_m=16,workers=2"));
        o.backward_schedule = o.weights_schedule = o.forward_schedule;
        o.row_align = 16;
        o.save = save;
        o.recompute_h = recompute_h;
        o.defer_weights = defer_weights;
        o.row_pool = true;
        expect_same_bits(run_layer(data, o), expected(data, o),
                         cat(ranks, " ranks, ", preset, ", save ", name(save), ", recompute_h ",
                             recompute_h, ", defer_weights ", defer_weights));
      }
    }
  }
}

TEST(RowPages, EveryPresetWhateverIsKept) {
  for (const int ranks : {1, 2, 4}) {
    const LayerData data = plain_layer(ranks, 40);
    for (const char* preset : kPresets) expect_same_bits_whatever_is_kept(data, ranks, preset);
  }
}

TEST(RowPages, OfExpertsWithBiases) {
  for (const int ranks : {1, 2}) {
    for (const Probs probs : {Probs::kBefore, Probs::kAfter}) {
      SCOPED_TRACE(name(probs));
      LayerData data = plain_layer(ranks, 40);
      Rng rng(5);
      data.activation = Activation::kGptOss;
      data.probs = probs;
      data.b1 = random_bf16(rng, data.num_experts * data.w1_rows(), 1);
      data.b2 = random_bf16(rng, data.num_experts * data.hidden, 1);
      expect_same_bits_whatever_is_kept(data, ranks, "single");
    }
  }
}

/// Random routing in which low experts get more.
std::vector<std::int32_t> skewed_ids(Rng& rng, std::int64_t slots, int experts) {
  std::uniform_real_distribution<double> uniform(0, 1);
  std::vector<std::int32_t> ids(static_cast<std::size_t>(slots));
  const double skew = 1 + 2 * uniform(rng);
  for (std::int32_t& id : ids) {
    id = std::min(static_cast<std::int32_t>(experts * std::pow(uniform(rng), skew)), experts - 1);
  }
  return ids;
}

struct Choice {
  Save save;
  bool recompute_h;
};

/// 100 outstanding forwards of ten layers, or as many as there are cases, hold, on every rank,
/// pages of at most 8 % more bytes than the rows and tokens that came have. All go back. Returns
/// the most of a rank, in %.
double expect_memory_follows(Choice choice, std::int64_t hidden, std::int64_t intermediate) {
  constexpr int kRanks = 4, kLayers = 10;
  const int forwards = cases(100);
  LayerData data = plain_layer(kRanks, 512);
  data.hidden = hidden;
  data.intermediate = intermediate;
  data.num_experts = 4 * kRanks;
  data.topk = 4;
  data.x.resize(static_cast<std::size_t>(data.tokens * hidden));
  data.topk_probs.assign(static_cast<std::size_t>(data.tokens * data.topk), 0.5f);
  data.w1.resize(static_cast<std::size_t>(data.num_experts * 2 * intermediate * hidden));
  data.w2.resize(static_cast<std::size_t>(data.num_experts * hidden * intermediate));
  data.dy = data.x;
  data.topk_ids.assign(static_cast<std::size_t>(data.tokens * data.topk), 0);
  Problem problem = workload::Split(data, kRanks).problem();
  problem.row_align = 16;
  problem.save = choice.save;
  problem.recompute_h = choice.recompute_h;
  const std::int64_t row_bytes = 4 + (choice.save == Save::kRows ? 2 * hidden : 0) +
                                 (choice.recompute_h ? 0 : 4 * problem.intermediate);
  const std::int64_t token_bytes = choice.save == Save::kTokens ? 2 * hidden : 0;
  double percents[kRanks] = {};
  run_ranks(Communicator::cpu_group(kRanks), [&](Communicator& c) {
    const RowPool pool(problem, c, {.bytes = PagePoolLayout(problem, 200000).bytes});
    std::vector<Layer> layers;
    for (int i = 0; i < kLayers; ++i)
      layers.emplace_back(problem, c, LayerOptions{.row_pool = pool});
    LayerData own = data;
    Rng rng(7);
    std::vector<Saved> outstanding;
    std::int64_t came = 0;
    const Schedule schedule = parse_schedule("single,tile_m=16,workers=1");
    LayerResult result = workload::make_result(data, {});
    for (int i = 0; i < forwards; ++i) {
      own.topk_ids = skewed_ids(rng, data.tokens * data.topk, data.num_experts);
      const workload::Split split(own, kRanks);
      Layer& layer = layers[static_cast<std::size_t>(i % kLayers)];
      const RoutingPlan plan = layer.plan(split.topk_ids(c.rank()));
      for (const std::int64_t rows : plan.tokens_per_expert()) came += rows * row_bytes;
      came += plan.received_tokens() * token_bytes;
      outstanding.push_back(layer.forward(plan, split.forward_args(c.rank(), result), schedule));
    }
    const std::int64_t held = (pool.pages() - pool.free_pages()) * pool.page_bytes();
    for (const Saved& saved : outstanding) EXPECT_EQ(saved.bytes(), 0u) << "pages aside";
    const double percent = 100.0 * static_cast<double>(held) / static_cast<double>(came) - 100;
    EXPECT_LT(percent, 8) << "rank " << c.rank();
    if (choice.save == Save::kRows) {
      EXPECT_LT(held, forwards * row_bytes * capacity_rows(problem, kRanks) / 2)
          << "the capacity does not matter";
    }
    EXPECT_EQ(pool.fewest_free_pages(), pool.free_pages());
    percents[c.rank()] = percent;
    outstanding.clear();
    EXPECT_EQ(pool.free_pages(), pool.pages());
  });
  return *std::ranges::max_element(percents);
}

TEST(RowPages, MemoryFollowsTheRowsThatCame) {
  RecordProperty("percent_more_than_rows", cat(expect_memory_follows({Save::kRows, false}, 8, 8)));
}
TEST(RowPages, MemoryFollowsTheTokensThatCame) {
  RecordProperty("percent_more", cat(expect_memory_follows({Save::kTokens, false}, 24, 16)));
}
/// A page has a token each here, which needs to be long beside the probabilities of 16 rows.
TEST(RowPages, MemoryFollowsTokensWhereNothingElseIsKept) {
  RecordProperty("percent_more", cat(expect_memory_follows({Save::kTokens, true}, 512, 8)));
}

}  // namespace
}  // namespace uniep::testing
