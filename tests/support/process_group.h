#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstring>
#include <functional>
#include <new>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/check.h"
#include "uniep/communicator.h"

namespace uniep::testing {

/// Memory that processes which are forked later have in common, zeroed.
template <class T>
class Common {
 public:
  Common()
      : value_(new (mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1,
                         0)) T()) {}
  ~Common() { munmap(value_, sizeof(T)); }
  Common(const Common&) = delete;
  Common& operator=(const Common&) = delete;
  T& operator*() const { return *value_; }
  T* operator->() const { return value_; }

 private:
  T* value_;
};

/// Where the processes of one group gather bytes: the launcher of these tests.
struct MeetingPlace {
  static constexpr std::size_t kBytes = 2048;
  static constexpr int kMostRanks = 16;
  using Cards = std::array<std::array<std::byte, kBytes>, kMostRanks>;
  std::atomic<int> arrived;
  std::array<Cards, 2> by_turns;  // who has gone on to the next round writes beside who still reads

  void all_gather(int rank, int size, std::span<const std::byte> own, std::span<std::byte> all) {
    require(size <= kMostRanks && own.size() <= kBytes &&
                all.size() == own.size() * static_cast<std::size_t>(size),
            ErrorCode::kInternal, "a card of ", own.size(), " bytes, and room for ", all.size());
    // All of a round arrive before any of the next.
    const int turn = arrived / size % 2;
    Cards& cards = by_turns[static_cast<std::size_t>(turn)];
    std::memcpy(cards[static_cast<std::size_t>(rank)].data(), own.data(), own.size());
    const int round = (arrived.fetch_add(1) / size + 1) * size;
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (arrived < round) {
      require(std::chrono::steady_clock::now() < until, ErrorCode::kTimeout, "nobody came");
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
    for (int r = 0; r < size; ++r) {
      std::memcpy(all.data() + static_cast<std::size_t>(r) * own.size(),
                  cards[static_cast<std::size_t>(r)].data(), own.size());
    }
  }

  GroupOptions options(int rank, int size) {
    return {.rank = rank, .size = size, .all_gather = [=, this](auto own, auto all) {
              all_gather(rank, size, own, all);
            }};
  }
};

/// The processes of a test, which it may kill, stop and outlive.
class Crew {
 public:
  /// How a process ended.
  struct End {
    std::string said;    ///< what its body returned, or "error CODE: sentence"
    int signal = 0;      ///< that killed it
    int exit_code = 0;   ///< 0; 1 where its body threw; 2 where an expectation failed there
    double seconds = 0;  ///< from `since`
  };
  using Body = std::function<std::string(int rank)>;

  Crew(int size, const Body& body) {
    for (int r = 0; r < size; ++r) start(r, body);
  }
  ~Crew() {
    for (Process& p : processes_) {
      if (p.pid > 0) kill(p.pid, SIGKILL);
      if (p.pid > 0) waitpid(p.pid, nullptr, 0);
      close(p.output);
    }
  }
  Crew(const Crew&) = delete;
  Crew& operator=(const Crew&) = delete;

  pid_t pid(int rank) const { return processes_[static_cast<std::size_t>(rank)].pid; }
  void signal(int rank, int number) { kill(pid(rank), number); }

  /// Waits for one; a process that has not ended after `limit` is killed, and that is a failure.
  End end_of(int rank, std::chrono::steady_clock::time_point since,
             std::chrono::seconds limit = std::chrono::seconds(60)) {
    Process& p = processes_[static_cast<std::size_t>(rank)];
    End end;
    int status = 0;
    while (waitpid(p.pid, &status, WNOHANG) == 0) {
      if (std::chrono::steady_clock::now() - since > limit) {
        ADD_FAILURE() << "the process of rank " << rank << " hangs";
        kill(p.pid, SIGKILL);
        waitpid(p.pid, &status, 0);
        break;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    p.pid = -1;
    end.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - since).count();
    if (WIFSIGNALED(status)) end.signal = WTERMSIG(status);
    if (WIFEXITED(status)) end.exit_code = WEXITSTATUS(status);
    char buffer[4096];
    ssize_t n = 0;
    while ((n = read(p.output, buffer, sizeof(buffer))) > 0) {
      end.said.append(buffer, static_cast<std::size_t>(n));
    }
    EXPECT_NE(end.exit_code, 2) << "an expectation failed in the process of rank " << rank;
    return end;
  }

  /// All that are still there.
  std::vector<End> ends() {
    const auto since = std::chrono::steady_clock::now();
    std::vector<End> all;
    for (std::size_t r = 0; r < processes_.size(); ++r) {
      all.push_back(end_of(static_cast<int>(r), since));
    }
    return all;
  }

 private:
  struct Process {
    pid_t pid = -1;
    int output = -1;
  };

  void start(int rank, const Body& body) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) ADD_FAILURE() << "pipe";
    (void)fcntl(ends[0], F_SETFL, O_NONBLOCK);
    const pid_t pid = fork();
    if (pid == 0) {
      int code = 0;
      std::string said;
      try {
        said = body(rank);
      } catch (const Error& e) {
        said = cat("error ", static_cast<int>(e.code()), ": ", e.what());
        code = 1;
      } catch (const std::exception& e) {
        said = cat("exception: ", e.what());
        code = 1;
      }
      if (write(ends[1], said.data(), said.size()) != static_cast<ssize_t>(said.size())) code = 2;
      _exit(::testing::Test::HasFailure() ? 2 : code);
    }
    close(ends[1]);
    processes_.push_back({pid, ends[0]});
  }

  std::vector<Process> processes_;
};

}  // namespace uniep::testing
