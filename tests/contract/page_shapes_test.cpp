// What a page of a row pool holds, and where.
#include <gtest/gtest.h>

#include "base/check.h"
#include "graph/layer_graph.h"
#include "layout/page_pool.h"
#include "support/random_case.h"

namespace uniep::testing {
namespace {

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

}  // namespace
}  // namespace uniep::testing
