#pragma once

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <functional>
#include <string>
#include <vector>

#include "base/check.h"
#include "uniep/error.h"

namespace uniep::testing {

/// Something that happens, told from one process to another. Made before they are forked.
class ProcessEvent {
 public:
  ProcessEvent() {
    if (pipe(ends_.data()) != 0) ADD_FAILURE() << "pipe";
  }
  ~ProcessEvent() {
    for (const int end : ends_) close(end);
  }
  ProcessEvent(const ProcessEvent&) = delete;
  ProcessEvent& operator=(const ProcessEvent&) = delete;

  void tell() const { EXPECT_EQ(write(ends_[1], "x", 1), 1); }
  /// Until it was told so many times.
  void wait(int times = 1) const {
    constexpr int kLimitMs = 60000;
    pollfd told{.fd = ends_[0], .events = POLLIN, .revents = 0};
    for (char byte = 0; times > 0; --times) {
      const bool in_time = poll(&told, 1, kLimitMs) == 1;
      EXPECT_TRUE(in_time && read(ends_[0], &byte, 1) == 1) << "an event did not come";
    }
  }

 private:
  std::array<int, 2> ends_{};
};

/// Runs `body` in a process of its own for each rank, and returns what each returned; for one that
/// threw an Error "error CODE: sentence", for one that was killed "signal NUMBER". Expectations
/// that fail there, which only the child's own GoogleTest counts, fail here too.
inline std::vector<std::string> forked_ranks(int count,
                                             const std::function<std::string(int)>& body) {
  std::vector<std::array<int, 2>> pipes(static_cast<std::size_t>(count));
  std::vector<pid_t> children;
  for (int r = 0; r < count; ++r) {
    auto& ends = pipes[static_cast<std::size_t>(r)];
    if (pipe(ends.data()) != 0) ADD_FAILURE() << "pipe";
    const pid_t pid = fork();
    if (pid == 0) {
      std::string said;
      try {
        said = body(r);
      } catch (const Error& e) {
        said = cat("error ", static_cast<int>(e.code()), ": ", e.what());
      } catch (const std::exception& e) {
        said = cat("exception: ", e.what());
      }
      const bool all =
          write(ends[1], said.data(), said.size()) == static_cast<ssize_t>(said.size());
      _exit(all && !::testing::Test::HasFailure() ? 0 : 1);
    }
    children.push_back(pid);
    close(ends[1]);
  }
  std::vector<std::string> all;
  for (int r = 0; r < count; ++r) {
    std::string said;
    char buffer[4096];
    ssize_t n = 0;
    while ((n = read(pipes[static_cast<std::size_t>(r)][0], buffer, sizeof(buffer))) > 0) {
      said.append(buffer, static_cast<std::size_t>(n));
    }
    close(pipes[static_cast<std::size_t>(r)][0]);
    int status = 0;
    waitpid(children[static_cast<std::size_t>(r)], &status, 0);
    if (WIFSIGNALED(status)) said = cat("signal ", WTERMSIG(status));
    EXPECT_FALSE(WIFEXITED(status) && WEXITSTATUS(status) != 0)
        << "an expectation failed in the process of rank " << r;
    all.push_back(said);
  }
  return all;
}

}  // namespace uniep::testing
