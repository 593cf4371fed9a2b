// When pages of a row pool are taken and go back, and what is refused.
#include <gtest/gtest.h>

#include "base/memory_info.h"
#include "contract/contract_testing.h"
#include "cpu/row_pool.h"
#include "layout/page_pool.h"
#include "plan/plan_data.h"
#include "support/expect_error.h"
#include "support/layer_group.h"

namespace uniep::testing {
namespace {

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
  Problem wide = problem_;
  wide.hidden = wide.intermediate = 1 << 20;
  try {
    RowPool(wide, alone_, {.bytes = std::int64_t{1} << 60});
    ADD_FAILURE() << "there is so much memory";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("options.bytes"), std::string::npos) << e.what();
  }
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
    PagePool& free = dynamic_cast<cpu::CpuRowPool&>(*pool_.data()).free();
    const PagePool::Planning another(free);
    expect_invalid(
        "rank 0: another thread is in Layer::plan of a layer with the same row pool; one at a time "
        "is accepted",
        [&] { plan(); });
  }
  EXPECT_NO_THROW(plan());
}

}  // namespace
}  // namespace uniep::testing
