// The canonical order of tokens: by host, rank and place, and back.
#include "base/token_order.h"

#include <gtest/gtest.h>

#include <tuple>
#include <vector>

namespace uniep {
namespace {

TEST(TokenOrder, IsByHostThenRankThenToken) {
  for (const int ranks : {1, 2, 3, 8}) {
    for (const int hosts : {1, 2, 3, 5}) {
      for (const std::int64_t of_block : {1, 2, 7}) {
        const TokenOrder order{ranks, hosts, hosts * of_block};
        std::int64_t number = 0;
        for (int host = 0; host < hosts; ++host) {
          for (int source = 0; source < ranks; ++source) {
            for (std::int64_t t = host * of_block; t < (host + 1) * of_block; ++t, ++number) {
              ASSERT_EQ(order.number(source, t), number);
              const auto [found, token] = order.token(number);
              ASSERT_EQ(std::tuple(found, token), std::tuple(source, t));
            }
          }
        }
        ASSERT_EQ(number, order.of_host() * hosts);
      }
    }
  }
}

/// One group of the ranks of all hosts has the same order, its rank h L + l being rank l of host h.
TEST(TokenOrder, IsThatOfOneGroupOfAllHosts) {
  const int hosts = 3, local_ranks = 4;
  const std::int64_t tokens = 5;
  const TokenOrder gathered{local_ranks, hosts, hosts * tokens};
  const TokenOrder all{hosts * local_ranks, 1, tokens};
  for (int rank = 0; rank < all.ranks; ++rank) {
    for (std::int64_t t = 0; t < tokens; ++t) {
      EXPECT_EQ(gathered.number(rank % local_ranks, rank / local_ranks * tokens + t),
                all.number(rank, t));
    }
  }
}

TEST(TokenOrder, OfNoTokensHasNoNumbers) {
  EXPECT_EQ((TokenOrder{4, 2, 0}.number(3, 0)), 0);
  EXPECT_EQ((TokenOrder{4, 1, 0}.number(3, 0)), 0);
}

}  // namespace
}  // namespace uniep
