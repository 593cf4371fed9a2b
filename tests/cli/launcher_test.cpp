#include "launcher.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <thread>

#include "base/check.h"

namespace uniep::tool {
namespace {

using std::chrono::milliseconds;

int launch(int count, const std::string& script, milliseconds grace = milliseconds(5000)) {
  return launch_ranks(count, {"sh", "-c", script}, {.program = "/bin/sh", .grace = grace});
}

/// A file that the children append to.
class Log {
 public:
  Log() : path_(std::filesystem::temp_directory_path() / cat("uniep_launcher_", getpid())) {
    std::filesystem::remove(path_);
  }
  ~Log() { std::filesystem::remove(path_); }
  std::string path() const { return path_.string(); }

  std::multiset<std::string> lines() const {
    std::ifstream file(path_);
    std::multiset<std::string> all;
    for (std::string line; std::getline(file, line);) all.insert(line);
    return all;
  }

 private:
  std::filesystem::path path_;
};

TEST(Launcher, EveryRankIsToldWhoItIs) {
  const Log log;
  EXPECT_EQ(launch(3, "echo $RANK $WORLD_SIZE $LOCAL_RANK $MASTER_ADDR >> " + log.path()), 0);
  EXPECT_EQ(log.lines(),
            (std::multiset<std::string>{"0 3 0 127.0.0.1", "1 3 1 127.0.0.1", "2 3 2 127.0.0.1"}));
}

TEST(Launcher, AllMeetAtOnePortAndKeepTheirEnvironment) {
  setenv("UNIEP_LAUNCHER_TEST", "kept", 1);
  setenv("RANK", "77", 1);
  const Log log;
  EXPECT_EQ(launch(2, "echo $MASTER_PORT $UNIEP_LAUNCHER_TEST >> " + log.path()), 0);
  unsetenv("RANK");
  unsetenv("UNIEP_LAUNCHER_TEST");
  const auto lines = log.lines();
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_EQ(*lines.begin(), *lines.rbegin());
  EXPECT_NE(lines.begin()->find(" kept"), std::string::npos);
}

TEST(Launcher, ReturnsTheCodeOfTheFirstThatFails) {
  EXPECT_EQ(launch(3, "if [ $RANK = 1 ]; then exit 7; fi; sleep 0.2; exit 9"), 7);
  EXPECT_EQ(launch(2, "if [ $RANK = 1 ]; then kill -ABRT $$; fi"), 128 + SIGABRT);
  EXPECT_EQ(launch_ranks(1, {"x"}, {.program = "/no/such/program"}), 127);
}

TEST(Launcher, KillsTheOthersAfterTheGracePeriod) {
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(launch(3, "if [ $RANK = 2 ]; then exit 3; fi; exec sleep 60", milliseconds(200)), 3);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, milliseconds(10000));
}

TEST(Launcher, HandsSignalsOn) {
  sigset_t term, before;
  sigemptyset(&term);
  sigaddset(&term, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &term, &before);  // in the sender too: only launch_ranks takes it
  std::thread sender([] {
    std::this_thread::sleep_for(milliseconds(300));
    kill(getpid(), SIGTERM);
  });
  EXPECT_EQ(launch(2, "trap 'exit 5' TERM; while :; do sleep 0.05; done"), 5);
  sender.join();
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

}  // namespace
}  // namespace uniep::tool
