#include <gtest/gtest.h>

#include "bench/device_ranks.h"
#include "support/expect_error.h"

namespace uniep::tool {
namespace {

TEST(Ranks, SayWhereTheyShareGpus) {
  EXPECT_STATES(sharing_text(4, 4), "");
  EXPECT_STATES(sharing_text(1, 8), "");
  EXPECT_STATES(sharing_text(4, 1), "4 ranks on 1 GPU (UNIEP_SHARE_DEVICE): times mean nothing");
  EXPECT_STATES(sharing_text(8, 4), "8 ranks on 4 GPUs (UNIEP_SHARE_DEVICE): times mean nothing");
}

TEST(Ranks, ThatShareGpusAreNotMeasured) {
  Ranks ranks;
  EXPECT_NO_THROW(refuse_sharing("uniep tune", ranks));
  ranks.sharing = sharing_text(2, 1);
  testing::expect_error(
      ErrorCode::kUnsupported,
      "uniep tune measures, and here are 2 ranks on 1 GPU (UNIEP_SHARE_DEVICE): times mean "
      "nothing; one GPU for each rank is accepted",
      [&] { refuse_sharing("uniep tune", ranks); });
}

TEST(Ranks, OfTheCpuShareWhatTheyLike) {
  EXPECT_NO_THROW(refuse_sharing("uniep tune", Backend::kCpu, 64));
}

}  // namespace
}  // namespace uniep::tool
