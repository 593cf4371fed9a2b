#include "tune/parallel.h"

#include <gtest/gtest.h>

#include <stdexcept>

namespace uniep::tune {
namespace {

TEST(ForEachInParallel, CallsEachOnce) {
  std::vector<std::atomic<int>> calls(1000);
  for_each_in_parallel(calls.size(), [&](std::size_t i) { ++calls[i]; });
  for (const auto& n : calls) EXPECT_EQ(n, 1);
  for_each_in_parallel(0, [](std::size_t) { FAIL(); });
}

TEST(ForEachInParallel, ThrowsWhatOneOfThemThrows) {
  EXPECT_THROW(for_each_in_parallel(100,
                                    [](std::size_t i) {
                                      if (i == 42) throw std::runtime_error("forty-two");
                                    }),
               std::runtime_error);
}

}  // namespace
}  // namespace uniep::tune
