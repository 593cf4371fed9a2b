#include "tune/model/parallel.h"

#include <gtest/gtest.h>

#include <set>
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

TEST(ForEachInParallel, KeepsToTheNumberOfThreads) {
  for (const std::size_t most : {0, 1, 3}) {
    std::mutex mutex;
    std::set<std::thread::id> threads;
    for_each_in_parallel(100, most, [&](std::size_t) {
      const std::lock_guard lock(mutex);
      threads.insert(std::this_thread::get_id());
    });
    EXPECT_GE(threads.size(), 1u);
    EXPECT_LE(threads.size(), std::max<std::size_t>(1, most));
  }
}

}  // namespace
}  // namespace uniep::tune
