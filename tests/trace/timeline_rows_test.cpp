#include "trace/timeline_rows.h"

#include <gtest/gtest.h>

#include "trace/made_up_run.h"

namespace uniep::trace {
namespace {

std::vector<WorkerRow> rows_of(int ranks, int workers) {
  return worker_rows(MadeUpRun{.ranks = ranks, .workers = workers}.timeline());
}

TEST(SampledRows, FewRowsStayAsTheyAre) {
  const auto rows = rows_of(2, 5);
  const auto sample = sampled_rows(rows, 5);
  ASSERT_EQ(sample.size(), rows.size());
  for (std::size_t i = 0; i < rows.size(); ++i) {
    EXPECT_EQ(sample[i].rank, rows[i].rank);
    EXPECT_EQ(sample[i].worker, rows[i].worker);
  }
}

TEST(SampledRows, ManyAreThinnedEvenlyInEachRank) {
  const auto sample = sampled_rows(rows_of(3, 100), 4);
  ASSERT_EQ(sample.size(), 12u);
  for (int rank = 0; rank < 3; ++rank) {
    for (int i = 0; i < 4; ++i) {
      const WorkerRow& row = sample[static_cast<std::size_t>(4 * rank + i)];
      EXPECT_EQ(row.rank, rank);
      EXPECT_EQ(row.worker, 25 * i);
      EXPECT_FALSE(row.events.empty());
    }
  }
}

TEST(SampledRows, NoRowsNoSample) { EXPECT_TRUE(sampled_rows({}, 4).empty()); }

}  // namespace
}  // namespace uniep::trace
