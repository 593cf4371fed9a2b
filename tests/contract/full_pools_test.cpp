// Row pools that are too full for a routing: all ranks refuse it alike, with the bytes that would
// do.
#include <gtest/gtest.h>

#include "contract/contract_testing.h"
#include "cpu/row_pool.h"
#include "layout/page_pool.h"
#include "support/expect_error.h"
#include "support/layer_group.h"

namespace uniep::testing {
namespace {

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
        EXPECT_EQ(Overflow{overflow[0]}, Overflow::kPages);
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
