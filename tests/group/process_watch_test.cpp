// Who sees which process end, without a group.
#include "group/process_watch.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <optional>
#include <string>
#include <vector>

#include "support/forked_ranks.h"

namespace uniep::testing {
namespace {

TEST(ProcessWatch, SaysThatItLacksDescriptors) {
  const ProcessId other = this_process();
  const auto said = forked_ranks(1, [&](int) {
    const std::vector<ProcessId> ids{this_process(), other};
    const auto watch_all = [&] {
      return ProcessWatch::of(0, ids, RankLayout{.hosts = 1, .local_ranks = 2});
    };
    watch_all()->require_complete();
    const int next = dup(STDOUT_FILENO);
    close(next);
    const rlimit limit{static_cast<rlim_t>(next), static_cast<rlim_t>(next)};
    EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
    const auto watch = watch_all();
    EXPECT_NE(watch, nullptr) << "as if processes did not see each other";
    EXPECT_EQ(watch->end_of(1), std::nullopt) << "which it does not know";
    watch->require_complete();
    return std::string("nothing");
  });
  EXPECT_NE(said[0].find("ulimit -n"), std::string::npos) << said[0];
}

}  // namespace
}  // namespace uniep::testing
