#include "base/mixed_bits.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <set>
#include <string>
#include <vector>

namespace uniep {
namespace {

TEST(HashOf, DependsOnEveryValueAndOnTheirOrderAndNumber) {
  const std::vector<std::vector<std::int32_t>> ranges = {{},     {0},    {0, 0}, {1},
                                                         {1, 2}, {2, 1}, {-1},   {1, 2, 0}};
  std::set<std::uint64_t> hashes;
  for (const auto& range : ranges) hashes.insert(hash_of(range));
  EXPECT_EQ(hashes.size(), ranges.size());
}

TEST(HashOf, TakesCharactersAsBytes) {
  EXPECT_EQ(hash_of(std::string("a\xff")), hash_of(std::vector<std::uint8_t>{'a', 0xff}));
}

}  // namespace
}  // namespace uniep
