#include "group/process_environment.h"

#include <gtest/gtest.h>

#include <deque>

#include "support/expect_error.h"
#include "support/scoped_env.h"

namespace uniep::testing {
namespace {

/// Sets all five variables while it lives; an empty text counts as not set.
struct Launched {
  explicit Launched(const char* rank, const char* size, const char* local, const char* address,
                    const char* port) {
    variables.emplace_back("RANK", rank);
    variables.emplace_back("WORLD_SIZE", size);
    variables.emplace_back("LOCAL_RANK", local);
    variables.emplace_back("MASTER_ADDR", address);
    variables.emplace_back("MASTER_PORT", port);
  }
  std::deque<ScopedEnv> variables;
};

TEST(ProcessEnvironment, AllOrNone) {
  {
    const Launched none("", "", "", "", "");
    EXPECT_FALSE(process_environment().has_value());
  }
  {
    const Launched all("3", "4", "1", "localhost", "29500");
    const auto environment = process_environment();
    ASSERT_TRUE(environment.has_value());
    EXPECT_EQ(environment->rank, 3);
    EXPECT_EQ(environment->size, 4);
    EXPECT_EQ(environment->local_rank, 1);
    EXPECT_EQ(environment->master_address, "localhost");
    EXPECT_EQ(environment->master_port, 29500);
  }
  const Launched some("3", "4", "", "", "29500");
  expect_invalid(
      "of RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT these are not set: LOCAL_RANK, "
      "MASTER_ADDR; all of them (as torchrun sets them) or none are accepted",
      [] { process_environment(); });
}

TEST(ProcessEnvironment, RefusesWhatIsOutOfRange) {
  {
    const Launched l("4", "4", "0", "localhost", "29500");
    expect_invalid(
        "environment variable RANK is 4 and WORLD_SIZE is 4; a RANK from 0 to 3 is accepted",
        [] { process_environment(); });
  }
  {
    const Launched l("0", "65", "0", "localhost", "29500");
    expect_invalid("environment variable WORLD_SIZE is '65'; an integer from 1 to 64 is accepted",
                   [] { process_environment(); });
  }
  const Launched l("0", "2", "0", "localhost", "29500x");
  expect_invalid(
      "environment variable MASTER_PORT is '29500x'; an integer from 1 to 65535 is accepted",
      [] { process_environment(); });
}

}  // namespace
}  // namespace uniep::testing
