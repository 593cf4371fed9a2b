#include "common/launcher.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <set>
#include <sstream>
#include <thread>

#include "base/check.h"
#include "support/scoped_env.h"
#include "support/temporary_folder.h"

namespace uniep::tool {
namespace {

using std::chrono::milliseconds;

int launch(int count, const std::string& script, milliseconds grace = milliseconds(5000),
           milliseconds interrupted_grace = milliseconds(30000)) {
  return launch_ranks(
      count, {"sh", "-c", script},
      {.program = "/bin/sh", .grace = grace, .interrupted_grace = interrupted_grace});
}

/// A file that the children append to.
class Log {
 public:
  std::string path() const { return folder_.file("log"); }

  std::multiset<std::string> lines() const {
    std::istringstream text(testing::file_text(path()));
    std::multiset<std::string> all;
    for (std::string line; std::getline(text, line);) all.insert(line);
    return all;
  }

  void wait_for_lines(std::size_t count) const {
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (lines().size() < count && std::chrono::steady_clock::now() < limit) {
      std::this_thread::sleep_for(milliseconds(1));
    }
    EXPECT_EQ(lines().size(), count);
  }

 private:
  testing::TemporaryFolder folder_;
};

TEST(Launcher, EveryRankIsToldWhoItIs) {
  const Log log;
  EXPECT_EQ(launch(3, "echo $RANK $WORLD_SIZE $LOCAL_RANK $MASTER_ADDR >> " + log.path()), 0);
  EXPECT_EQ(log.lines(),
            (std::multiset<std::string>{"0 3 0 127.0.0.1", "1 3 1 127.0.0.1", "2 3 2 127.0.0.1"}));
}

TEST(Launcher, AllMeetAtOnePortAndKeepTheirEnvironment) {
  const testing::ScopedEnv kept("UNIEP_LAUNCHER_TEST", "kept");
  const testing::ScopedEnv replaced("RANK", "77");
  const Log log;
  EXPECT_EQ(launch(2, "echo $RANK $UNIEP_LAUNCHER_TEST $MASTER_PORT >> " + log.path()), 0);
  const auto lines = log.lines();
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_TRUE(lines.begin()->starts_with("0 kept ")) << *lines.begin();
  EXPECT_TRUE(lines.rbegin()->starts_with("1 kept ")) << *lines.rbegin();
  EXPECT_EQ(lines.begin()->substr(1), lines.rbegin()->substr(1)) << "the port";
}

TEST(Launcher, ReturnsTheCodeOfTheFirstThatFails) {
  EXPECT_EQ(launch(3, "if [ $RANK = 1 ]; then exit 7; fi; exec sleep 60", milliseconds(200)), 7);
  EXPECT_EQ(launch(2, "if [ $RANK = 1 ]; then kill -ABRT $$; fi"), 128 + SIGABRT);
  EXPECT_EQ(launch(1, "exit 127"), 1) << "what the system could not load";
  EXPECT_THROW(launch_ranks(1, {"x"}, {.program = "/no/such/program"}), Error);
}

TEST(Launcher, TellsOfARankThatCouldNotSayWhyItEnds) {
  const auto told = [](const std::string& script) {
    ::testing::internal::CaptureStderr();
    launch(3, script, milliseconds(200));
    return ::testing::internal::GetCapturedStderr();
  };
  const std::string killed = told("if [ $RANK = 1 ]; then kill -KILL $$; fi; exec sleep 60");
  EXPECT_NE(killed.find("rank 1 was ended by signal 9"), std::string::npos) << killed;
  EXPECT_EQ(std::ranges::count(killed, '\n'), 1) << "those killed for it are not worth a word";
  EXPECT_EQ(told("if [ $RANK = 1 ]; then exit 7; fi; exec sleep 60"), "");
  const std::string none = told("if [ $RANK = 2 ]; then exit 127; fi; exec sleep 60");
  EXPECT_NE(none.find("rank 2 could not be started"), std::string::npos) << none;
}

TEST(Launcher, PrintsWhatOthersSayUnlessRankZeroRefusesTheSame) {
  const auto told = [](const std::string& script) {
    ::testing::internal::CaptureStderr();
    launch(3, script, milliseconds(30000));
    return ::testing::internal::GetCapturedStderr();
  };
  EXPECT_EQ(told("echo refused >&2; exit 2"), "refused\n");
  EXPECT_EQ(told("echo $RANK >&2; [ $RANK = 0 ] && exit 2; exit 1"), "0\n1\n2\n");
  EXPECT_EQ(told("[ $RANK = 0 ] && exit 0; echo $RANK >&2; exit 2"), "1\n2\n");
  EXPECT_EQ(told("[ $RANK = 1 ] && head -c 10000 /dev/zero >&2").size(), 10000u);
}

TEST(Launcher, KillsTheOthersAfterTheGracePeriod) {
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(launch(3, "if [ $RANK = 2 ]; then exit 3; fi; exec sleep 60", milliseconds(200)), 3);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, milliseconds(30000));
}

/// What `launch` returns when this process is told to end as soon as both ranks run.
int terminated(const std::string& on_term, milliseconds grace, milliseconds interrupted_grace) {
  sigset_t term, before;
  sigemptyset(&term);
  sigaddset(&term, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &term, &before);  // in the sender too: only launch_ranks takes it
  const Log log;
  std::thread sender([&] {
    log.wait_for_lines(2);
    kill(getpid(), SIGTERM);
  });
  const int code = launch(2,
                          cat("trap '", on_term, "' TERM; echo ready >> ", log.path(),
                              "; while :; do sleep 0.05; done"),
                          grace, interrupted_grace);
  sender.join();
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return code;
}

TEST(Launcher, HandsSignalsOn) {
  EXPECT_EQ(terminated("exit 5", milliseconds(30000), milliseconds(30000)), 5);
}

TEST(Launcher, LetsRanksFinishWhenASignalHasEndedThem) {
  EXPECT_EQ(terminated("sleep 1; exit 5", milliseconds(100), milliseconds(30000)), 5);
}

TEST(Launcher, KillsRanksThatIgnoreASignal) {
  EXPECT_EQ(terminated("", milliseconds(30000), milliseconds(200)), 128 + SIGKILL);
}

}  // namespace
}  // namespace uniep::tool
