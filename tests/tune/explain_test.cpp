#include "tune/search/explain.h"

#include <gtest/gtest.h>

namespace uniep::tune {
namespace {

PassStats stats(double elapsed, double fc1, double wait, double link) {
  PassStats s;
  s.elapsed_s = elapsed;
  s.workers = 2;
  s[Stage::kFc1].busy_s = fc1;
  s[Stage::kFc1].wait_s = wait;
  s[Stage::kFc2].link_s = link;
  return s;
}

TEST(Breakdown, PartsAddUpToTheElapsedTime) {
  const Breakdown b = breakdown_of({stats(10, 8, 4, 2), stats(8, 8, 2, 2)});
  EXPECT_DOUBLE_EQ(b.busy[static_cast<std::size_t>(Stage::kFc1)], 4);
  EXPECT_DOUBLE_EQ(b.wait, 1.5);
  EXPECT_DOUBLE_EQ(b.link, 1);
  EXPECT_DOUBLE_EQ(b.rest, 9 - 4 - 1.5 - 1);
}

TEST(Explain, NamesWhatChangedMostFirst) {
  const Breakdown base = breakdown_of({stats(0.010, 0.008, 0.006, 0.002)});
  const Breakdown fast = breakdown_of({stats(0.0075, 0.0085, 0.002, 0.001)});
  EXPECT_EQ(explain(fast, base),
            "2.000 ms less waiting for inputs, 0.500 ms less waiting for the link, 0.250 ms less "
            "between tasks and launches; 0.250 ms more in fc1");
  EXPECT_EQ(explain(base, base), "no part differs by a fiftieth of the time");
}

TEST(Breakdown, TheMedianIsTakenPartByPart) {
  const Breakdown m =
      median_of({breakdown_of({stats(4, 2, 2, 2)}), breakdown_of({stats(6, 4, 2, 2)}),
                 breakdown_of({stats(8, 40, 2, 2)})});
  EXPECT_DOUBLE_EQ(m.busy[static_cast<std::size_t>(Stage::kFc1)], 2);
}

}  // namespace
}  // namespace uniep::tune
