// Saved rows in pages of a row pool: the bits are those of memory of their own, memory follows the
// rows that came, and every wrong use is refused with a sentence, on all ranks alike.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "base/memory_info.h"
#include "contract/contract_testing.h"
#include "cpu/row_pool.h"
#include "layout/workspace.h"
#include "plan/plan_data.h"
#include "support/expect_error.h"
#include "support/layer_group.h"

namespace uniep::testing {
namespace {

constexpr const char* kPresets[] = {"sequential", "pipelined:2", "two-kernel", "single"};

TEST(RowPages, EveryPresetWhateverIsKept) {
  for (const int ranks : {1, 2, 4}) {
    const LayerData data = plain_layer(ranks, 40);
    for (const char* preset : kPresets) {
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

/// 100 outstanding forwards of ten layers hold, on every rank, pages of at most 8 % more bytes than
/// the rows and tokens that came have. All go back. Returns the most of a rank, in %.
double expect_memory_follows(Choice choice, std::int64_t hidden, std::int64_t intermediate) {
  constexpr int kRanks = 4, kLayers = 10, kForwards = 100;
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
    for (int i = 0; i < kForwards; ++i) {
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
      EXPECT_LT(held, kForwards * row_bytes * capacity_rows(problem, kRanks) / 2)
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

// ---- What a page holds

Problem wide(std::int64_t hidden, std::int64_t intermediate, Save save, bool recompute_h) {
  return {.hidden = hidden,
          .intermediate = intermediate,
          .num_experts = 1,
          .topk = 1,
          .max_tokens = 1,
          .save = save,
          .recompute_h = recompute_h};
}

TEST(PageShapes, HaveTokensInPlaceOfHElseBesideTheRows) {
  const PageShape apart = page_shape(wide(7168, 2048, Save::kTokens, false));
  EXPECT_TRUE(apart.tokens_apart);
  EXPECT_EQ(apart.tokens, 73) << "of 7168 elements in 128 x 4096";
  EXPECT_EQ(apart.pages_of(0, 0), 0);
  EXPECT_EQ(apart.pages_of(256, 73), 2 + 1);
  EXPECT_EQ(apart.pages_of(256, 74), 2 + 2);
  EXPECT_EQ(apart.first_of_tokens(256), 2);
  for (const PageShape& beside : {page_shape(wide(7168, 2048, Save::kTokens, true)),
                                  page_shape(wide(4096, 8, Save::kTokens, false))}) {
    EXPECT_FALSE(beside.tokens_apart);
    EXPECT_EQ(beside.tokens, 8);
    EXPECT_EQ(beside.pages_of(256, 16), 2);
    EXPECT_EQ(beside.pages_of(256, 17), 3);
    EXPECT_EQ(beside.first_of_tokens(256), 0);
  }
  for (const Save save : {Save::kRows, Save::kNone}) {
    const PageShape rows = page_shape(wide(7168, 2048, save, false));
    EXPECT_EQ(rows.pages_of(256, 99), 2);
    EXPECT_EQ(rows.tokens_beside_rows(), 0);
  }
}

/// No two pages have a byte in common, nor do the rows and tokens of one page where they lie beside
/// one another; and all lies in the pool, ahead of the stack.
TEST(PageShapes, NoByteIsInTwoPages) {
  Rng rng(3);
  for (int i = 0; i < 200; ++i) {
    Problem p = wide(8 * pick(rng, 1, 40), 8 * pick(rng, 1, 20), kSaves[i % 3], chance(rng, 50));
    p.row_align = 16 << pick(rng, 0, 4);
    if (chance(rng, 30)) p.activation = Activation::kGelu;
    const std::int64_t pages = pick(rng, 1, 9);
    const PagePoolLayout layout(p, pages);
    const PageShape shape = page_shape(p);
    std::vector<int> owners(static_cast<std::size_t>(layout.free));  // 0: nobody
    const auto own = [&](std::int64_t begin, std::int64_t bytes, int owner, int also) {
      for (std::int64_t at = begin; at < begin + bytes; ++at) {
        int& of = owners.at(static_cast<std::size_t>(at));
        ASSERT_TRUE(of == 0 || of == also) << to_string(p) << ", byte " << at;
        of = owner;
      }
    };
    for (int page = 0; page < pages; ++page) {
      const int rows = 2 * page + 1, tokens = rows + 1;
      const auto own_rows = [&](Tensor t, std::int64_t width, std::int64_t size) {
        const std::int64_t bytes = p.row_align * width * size;
        if (is_saved(kLayerGraph[t], choice_of(p))) {
          own(layout.rows[t] + page * bytes, bytes, rows, 0);
        }
      };
      own_rows(Tensor::kXRows, p.hidden, 2);
      own_rows(Tensor::kH, halves(p) * p.intermediate, 2);
      own_rows(Tensor::kRowProbs, 1, 4);
      if (shape.tokens == 0) continue;
      EXPECT_GE(shape.token_stride, shape.tokens * p.hidden);
      EXPECT_LE(shape.tokens, 1 << shape.token_shift);
      for (const std::int64_t token : {pick(rng, 0, 99), pick(rng, 0, (1ll << 31) - 1)}) {
        for (const std::int64_t t : {token, token / shape.tokens * shape.tokens}) {
          EXPECT_EQ(shape.group_of(static_cast<std::int32_t>(t)), t / shape.tokens);
        }
      }
      own(layout.tokens + 2 * page * shape.token_stride, 2 * shape.tokens * p.hidden, tokens,
          shape.tokens_apart ? rows : 0);
    }
  }
}

// ---- When pages go back

class OneRank : public ::testing::Test {
 protected:
  static Problem with(Problem problem, Save save, bool recompute_h) {
    problem.save = save;
    problem.recompute_h = recompute_h;
    problem.row_align = 16;
    return problem;
  }
  static Schedule schedule() { return parse_schedule("single,tile_m=16,workers=1"); }
  CallOptions options(bool keep) const {
    CallOptions o{.schedule = schedule()};
    o.keep_pages = keep;
    return o;
  }

  const LayerData data_ = plain_layer(1, 40);
  const workload::Split split_{data_, 1};
  const Communicator alone_ = Communicator::cpu_group(1)[0];
  const Problem problem_ = with(split_.problem(), Save::kRows, false);
  const RowPool pool_ = roomy_pool(problem_, alone_);
  Layer layer_{problem_, alone_, {.row_pool = pool_}};
  LayerResult result_ = workload::make_result(data_, {});

  RoutingPlan plan() { return layer_.plan(split_.topk_ids(0)); }
  Saved forward() { return layer_.forward(plan(), split_.forward_args(0, result_), schedule()); }
  bool all_free() const { return pool_.free_pages() == pool_.pages(); }
  std::int64_t held() const { return pool_.pages() - pool_.free_pages(); }
};

TEST_F(OneRank, PlansTakePagesAndTheirEndGivesThemBack) {
  {
    const RoutingPlan first = plan();
    EXPECT_EQ(held(), first.padded_rows() / 16);
    const RoutingPlan copy = first, second = plan();
    EXPECT_EQ(held(), 2 * first.padded_rows() / 16);
  }
  EXPECT_TRUE(all_free());
  EXPECT_EQ(pool_.pages() - pool_.fewest_free_pages(), 2 * plan().padded_rows() / 16);
}

TEST_F(OneRank, TheEndOfSavedGivesThemBackThoughThePlanLivesOn) {
  const RoutingPlan kept = plan();
  {
    const Saved saved = layer_.forward(kept, split_.forward_args(0, result_), schedule());
    EXPECT_TRUE(saved.h().empty()) << "no rows one after another";
    EXPECT_FALSE(all_free());
  }
  EXPECT_TRUE(all_free());
  expect_invalid(
      "rank 0: plan has had a forward pass; with a row pool, whose pages a plan takes once, a new "
      "plan is accepted",
      [&] { layer_.forward(kept, split_.forward_args(0, result_), schedule()); });
}

TEST_F(OneRank, BackwardGivesThemBackOnceUnlessTheyAreKept) {
  const Saved saved = forward();
  const BackwardArgs args = split_.backward_args(0, result_);
  for (int i = 0; i < 2; ++i) {
    layer_.backward(saved, args, options(true));
    EXPECT_FALSE(all_free());
  }
  layer_.backward(saved, args, options(false));
  expect_same_bits(result_, reference::contract(data_), "the third");
  EXPECT_TRUE(all_free());
  const char* gone =
      "rank 0: saved has no pages any more: a backward pass gave them back to the row pool; one "
      "with CallOptions::keep_pages keeps them for another";
  const RoutingPlan other = plan();  // has them now
  expect_invalid(gone, [&] { layer_.backward(saved, args, options(false)); });
  EXPECT_EQ(held(), other.padded_rows() / 16) << "nothing goes back twice";
}

TEST_F(OneRank, OfAPassInPartsTheLastThatReadsThemGivesThemBack) {
  const BackwardArgs args = split_.backward_args(0, result_);
  for (const Save save : kSaves) {
    for (const bool recompute_h : {false, true}) {
      const Problem problem = with(problem_, save, recompute_h);
      const RowPool pool = roomy_pool(problem, alone_);
      Layer layer(problem, alone_, {.row_pool = pool});
      const auto free = [&] { return pool.free_pages() == pool.pages(); };
      Saved saved = layer.forward(layer.plan(split_.topk_ids(0)), split_.forward_args(0, result_),
                                  schedule());
      layer.backward_data(saved, data_args(args), options(true));
      EXPECT_FALSE(free());
      layer.backward_data(saved, data_args(args), options(false));
      EXPECT_EQ(free(), save != Save::kRows) << "weight gradients read rows of x, where kept";
      layer.backward_weights(saved, weights_args(args), options(false));
      EXPECT_TRUE(free());
      expect_same_bits(result_, reference::contract(data_), cat("save ", name(save)));
    }
  }
}

TEST_F(OneRank, WeightGradientsMissRowsThatAWholePassGaveBack) {
  Saved saved = forward();
  const BackwardArgs args = split_.backward_args(0, result_);
  layer_.backward_data(saved, data_args(args), options(true));
  layer_.backward(saved, args, options(false));
  expect_invalid(
      "saved has no pages any more: a backward pass gave them back to the row pool; one with "
      "CallOptions::keep_pages keeps them for another",
      [&] { layer_.backward_weights(saved, weights_args(args), options(false)); });
}

TEST_F(OneRank, APoolOutlivesItsHandleAndItsLayers) {
  std::optional<Layer> layer;
  {
    const RowPool own = roomy_pool(problem_, alone_);
    layer.emplace(problem_, alone_, LayerOptions{.row_pool = own});
  }
  const RoutingPlan plan = layer->plan(split_.topk_ids(0));
  layer.reset();
  EXPECT_TRUE(plan.data().lease->is_held());
}

// ---- What is refused

TEST_F(OneRank, MemoryOfTheCallersIsRefusedWhereThePoolHasIt) {
  std::vector<std::byte> bytes(1 << 20);
  std::vector<float> floats(1 << 12);
  expect_invalid(cat("rank 0: memory.plan has ", bytes.size(),
                     " bytes, but the layer has a row pool; none are accepted, since memory of the "
                     "caller's could not give a plan's pages back"),
                 [&] { layer_.plan(split_.topk_ids(0), {.memory = {.plan = bytes}}); });
  const RoutingPlan usable = plan();
  CallOptions with_memory = options(false);
  with_memory.memory.row_probs = floats;
  expect_invalid(
      "rank 0: memory has x_rows, h or row_probs, but the layer has a row pool for them; none are "
      "accepted",
      [&] { layer_.forward(usable, split_.forward_args(0, result_), with_memory); });
  expect_invalid(
      "the layer has a row pool, and what it saves is not in the caller's memory; what forward "
      "returned is accepted, or a layer without a pool",
      [&] { layer_.restore({.plan = bytes}, data_.tokens); });
  EXPECT_FALSE(all_free()) << "a refused call takes no pages from the plan";
  const Saved saved = layer_.forward(usable, split_.forward_args(0, result_), schedule());
  layer_.backward(saved, split_.backward_args(0, result_), schedule());
  expect_same_bits(result_, reference::contract(data_), "after refusals");
}

TEST_F(OneRank, PlansOfOtherPoolsAreRefused) {
  Layer plain(problem_, alone_);
  Layer other(problem_, alone_, {.row_pool = roomy_pool(problem_, alone_)});
  Layer same(problem_, alone_, {.row_pool = pool_});
  const auto forward_of = [&](Layer& layer, const RoutingPlan& p) {
    return layer.forward(p, split_.forward_args(0, result_), schedule());
  };
  expect_invalid(
      "rank 0: plan has pages of a row pool, and this layer has no pool; a plan of this layer is "
      "accepted",
      [&] { forward_of(plain, plan()); });
  const char* no_pages =
      "rank 0: plan has no pages of the layer's row pool; a plan of a layer with that pool is "
      "accepted";
  expect_invalid(no_pages, [&] { forward_of(other, plan()); });
  expect_invalid(no_pages, [&] { forward_of(other, plain.plan(split_.topk_ids(0))); });
  EXPECT_NO_THROW(forward_of(same, plan()));
  EXPECT_TRUE(all_free());
}

TEST_F(OneRank, APoolOfOtherRowsIsRefused) {
  expect_invalid(
      "rank 0: options.row_pool has pages for hidden=72, intermediate=40, row_align=16, save=rows, "
      "recompute_h=false; one for hidden=72, intermediate=40, row_align=16, save=none, "
      "recompute_h=false is accepted",
      [&] { Layer(with(problem_, Save::kNone, false), alone_, {.row_pool = pool_}); });
  Problem ungated = problem_;  // whose rows of h are half as long
  ungated.activation = Activation::kGelu;
  expect_invalid(
      "rank 0: options.row_pool has pages for hidden=72, intermediate=40, row_align=16, save=rows, "
      "recompute_h=false; one for hidden=72, intermediate=40, row_align=16, save=rows, "
      "recompute_h=false, without a gate is accepted",
      [&] { Layer(ungated, alone_, {.row_pool = pool_}); });
  Problem more = problem_;  // what does not change a page
  more.num_experts *= 2;
  more.topk = 1;
  more.max_tokens *= 2;
  EXPECT_NO_THROW(Layer(more, alone_, {.row_pool = pool_}));
}

TEST_F(OneRank, PoolsWithoutRoomOrMemoryAreRefused) {
  const std::int64_t one = PagePoolLayout(problem_, 1).bytes;
  EXPECT_EQ(RowPool(problem_, alone_, {.bytes = one}).pages(), 1);
  expect_invalid(
      cat("a row pool of ", one - 1, " bytes has no page; ", one, " or more are accepted"),
      [&] { RowPool(problem_, alone_, {.bytes = one - 1}); });
  expect_invalid("options.bytes is -1; 1 or more is accepted, and 0 for half of the free memory",
                 [&] { RowPool(problem_, alone_, {.bytes = -1}); });
  const GuardedMemory memory(one + 64);
  expect_invalid(
      cat("options.memory has ", one, " bytes; options.bytes=", one + 1, " or more are accepted"),
      [&] {
        RowPool(problem_, alone_,
                {.bytes = one + 1, .memory = memory.bytes().first(static_cast<std::size_t>(one))});
      });
  expect_invalid(
      cat("options.memory starts at address ", reinterpret_cast<std::uintptr_t>(memory.data() + 8),
          "; a multiple of 64 is accepted"),
      [&] { RowPool(problem_, alone_, {.memory = memory.bytes().subspan(8)}); });
}

TEST_F(OneRank, APoolInTheCallersMemoryStaysInIt) {
  const GuardedMemory memory(PagePoolLayout(problem_, 12).bytes);
  const RowPool pool(problem_, alone_, {.memory = memory.bytes()});
  EXPECT_EQ(pool.pages(), 12);
  Layer layer(problem_, alone_, {.row_pool = pool});
  const RoutingPlan other = stir_pages(layer, split_.topk_ids(0));
  const Saved saved =
      layer.forward(layer.plan(split_.topk_ids(0)), split_.forward_args(0, result_), schedule());
  EXPECT_EQ(pool.free_pages(), 0);
  layer.backward(saved, split_.backward_args(0, result_), schedule());
  expect_same_bits(result_, reference::contract(data_), "to the last page");
}

TEST_F(OneRank, ADefaultPoolHasHalfOfTheFreeMemory) {
  Problem large = problem_;
  large.hidden = large.intermediate = 4096;
  large.row_align = 128;
  const double before = available_memory();
  const RowPool pool(large, alone_);
  EXPECT_LE(static_cast<double>(pool.bytes()), 0.55 * before);
  EXPECT_GE(static_cast<double>(pool.bytes()), 0.25 * before);
}

TEST_F(OneRank, PlansAreMadeOneAtATime) {
  {
    PagePool& free = dynamic_cast<cpu::HostRowPool&>(*pool_.data()).free();
    const PagePool::Planning another(free);
    expect_invalid(
        "rank 0: another thread is in Layer::plan of a layer with the same row pool; one at a time "
        "is accepted",
        [&] { plan(); });
  }
  EXPECT_NO_THROW(plan());
}

/// A tensor that is saved by another count than that of rows or tokens has no place in pages.
TEST(RowPagesOfAGraph, HoldTensorsOfRowsAndTokensOnly) {
  EXPECT_EQ(unpaged_tensor(kLayerGraph), nullptr);
  Graph graph = kLayerGraph;
  graph.add({.tensor = Tensor::kNone,
             .name = "by_tokens",
             .shape = {Extent::kTokens, Extent::kHidden},
             .lifetime = Lifetime::kSaved});
  ASSERT_NE(unpaged_tensor(graph), nullptr);
  EXPECT_STREQ(unpaged_tensor(graph)->name, "by_tokens");
}

// ---- Pools that are too full

class TwoPools : public ::testing::Test {
 protected:
  static constexpr int kRanks = 2;
  static Problem problem_of(const workload::Split& split, Save save = Save::kRows) {
    Problem p = split.problem();
    p.row_align = 16;
    p.save = save;
    return p;
  }
  RowPoolOptions of_pages(std::int64_t pages) const {
    return {.bytes = PagePoolLayout(problem_, pages).bytes};
  }

  const LayerData data_ = plain_layer(kRanks, 40);  // 80 rows a rank, 40 an expert: 6 pages
  const workload::Split split_{data_, kRanks};
  const Problem problem_ = problem_of(split_);
  const Schedule schedule_ = parse_schedule("single,tile_m=16,workers=1");
  LayerResult result_ = workload::make_result(data_, {});

  /// `step`: pages that a step of either rank takes.
  void expect_refused_alike(const Problem& problem, std::int64_t step);
};

/// The pool of rank 1 is too small for a second step. Both ranks say so, nothing is taken, and the
/// bytes that are named would do.
void TwoPools::expect_refused_alike(const Problem& problem, std::int64_t step) {
  const auto of_pages = [&](std::int64_t pages) -> RowPoolOptions {
    return {.bytes = PagePoolLayout(problem, pages).bytes};
  };
  const std::int64_t would_do = bytes_for_pages(page_bytes(problem), 2 * step);
  EXPECT_GE(pages_in(problem, would_do), 2 * step);
  for (const std::int64_t pages : {2 * step - 1, 2 * step}) {
    run_ranks(Communicator::cpu_group(kRanks), [&](Communicator& c) {
      const RowPool pool(problem, c,
                         c.rank() == 1 ? of_pages(pages) : RowPoolOptions{.bytes = 1 << 20});
      Layer layer(problem, c, {.row_pool = pool});
      const Saved first = layer.forward(layer.plan(split_.topk_ids(c.rank())),
                                        split_.forward_args(c.rank(), result_), schedule_);
      const auto second = [&] { return layer.plan(split_.topk_ids(c.rank())); };
      if (pages == 2 * step) {
        EXPECT_NO_THROW(second());
        return;
      }
      const std::int64_t free = pool.free_pages();
      expect_error(
          ErrorCode::kCapacity,
          cat("rank 1 would save ", step, " pages, but ", step, " of the ", pages,
              " pages of its row pool are held by other plans; ", would_do, " bytes (", 2 * step,
              " pages) would do for this routing, or backward passes ahead of it"),
          second);
      std::int64_t overflow[2] = {-1, -1};
      {
        const RoutingPlan none = layer.plan(split_.topk_ids(c.rank()), {.overflow = overflow});
        EXPECT_EQ(overflow[0], 3);
        EXPECT_EQ(overflow[1], would_do);
        EXPECT_EQ(pool.free_pages(), free);
        LayerResult nan = workload::make_result(data_, {});
        const Saved filled = layer.forward(none, split_.forward_args(c.rank(), nan), schedule_);
        layer.backward(filled, split_.backward_args(c.rank(), nan), schedule_);
        EXPECT_TRUE(std::isnan(to_float(split_.backward_args(c.rank(), nan).dx[0])));
      }
      EXPECT_EQ(pool.free_pages(), free) << "a plan without rows has no pages to give back";
      layer.backward(first, split_.backward_args(c.rank(), result_), schedule_);
      EXPECT_NO_THROW(second());
    });
    if (pages < 2 * step) {
      expect_same_bits(result_, reference::contract(data_), "the first step");
    }
  }
}

TEST_F(TwoPools, AreRefusedOnAllRanksAlikeWithTheBytesThatWouldDo) {
  expect_refused_alike(problem_, 6);
}

/// Of 40 tokens a rank. A page has 17 of them in place of 16 rows of h, or 8 beside 128
/// probabilities.
TEST_F(TwoPools, OfTokensAreRefusedAlike) {
  expect_refused_alike(problem_of(split_, Save::kTokens), 9);
  Problem problem = problem_of(split_, Save::kTokens);
  problem.recompute_h = true;
  problem.row_align = 128;
  expect_refused_alike(problem, 5);
}

/// One rank's tensor is too small: no rank loses its plan's pages, and the plan can still be used.
TEST_F(TwoPools, KeepThePagesOfAPlanWhoseForwardIsRefused) {
  run_ranks(Communicator::cpu_group(kRanks), [&](Communicator& c) {
    const RowPool pool(problem_, c, of_pages(6));
    Layer layer(problem_, c, {.row_pool = pool});
    const RoutingPlan plan = layer.plan(split_.topk_ids(c.rank()));
    ForwardArgs args = split_.forward_args(c.rank(), result_);
    if (c.rank() == 1) args.x = args.x.subspan(1);
    EXPECT_THROW(layer.forward(plan, args, schedule_), Error);
    EXPECT_EQ(pool.free_pages(), 0);
    args = split_.forward_args(c.rank(), result_);
    const Saved saved = layer.forward(plan, args, schedule_);
    layer.backward(saved, split_.backward_args(c.rank(), result_), schedule_);
    EXPECT_EQ(pool.free_pages(), 6);
  });
  expect_same_bits(result_, reference::contract(data_), "after a refusal");
}

/// Of several pools the one that lacks most is named, and the capacity comes first.
TEST_F(TwoPools, TheFaultIsTheWorst) {
  Problem narrow = problem_;
  narrow.capacity_rows = 80;
  for (const bool too_narrow : {false, true}) {
    const Problem& problem = too_narrow ? narrow : problem_;
    run_ranks(Communicator::cpu_group(kRanks), [&](Communicator& c) {
      Layer layer(problem, c, {.row_pool = RowPool(problem, c, of_pages(c.rank() == 0 ? 2 : 1))});
      const auto plan = [&] { layer.plan(split_.topk_ids(c.rank())); };
      if (too_narrow) {
        return expect_error(ErrorCode::kCapacity,
                            "rank 0 would receive 96 rows (padding included), but capacity_rows is "
                            "80; capacity_rows=96 would do for this routing",
                            plan);
      }
      expect_error(ErrorCode::kCapacity,
                   cat("rank 1 would save 6 pages, but 0 of the 1 pages of its row pool "
                       "are held by other plans; ",
                       bytes_for_pages(page_bytes(problem), 6),
                       " bytes (6 pages) would do for this routing, or backward passes ahead of "
                       "it"),
                   plan);
    });
  }
}

TEST_F(TwoPools, AllRanksHaveOneOrNone) {
  std::string said[kRanks];
  run_ranks(Communicator::cpu_group(kRanks), [&](Communicator& c) {
    LayerOptions options;
    if (c.rank() == 0) options.row_pool = RowPool(problem_, c, of_pages(6));
    try {
      Layer(problem_, c, options);
    } catch (const Error& e) {
      said[c.rank()] = e.what();
    }
  });
  for (const std::string& sentence : said) {
    EXPECT_STATES(sentence, cat("ranks disagree: rank 0 calls layer ", to_string(problem_),
                                " with a row pool; rank 1 calls layer ", to_string(problem_),
                                "; the same call on every rank is accepted"));
  }
}

}  // namespace
}  // namespace uniep::testing
