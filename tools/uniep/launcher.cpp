#include "launcher.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>

#include "base/check.h"
#include "group/tcp_bootstrap.h"

extern char** environ;

namespace uniep::tool {
namespace {

using Clock = std::chrono::steady_clock;

/// Keeps the signals that a launcher waits for from being delivered meanwhile.
class SignalsHeld {
 public:
  SignalsHeld() {
    sigemptyset(&set_);
    for (const int s : {SIGCHLD, SIGINT, SIGTERM}) sigaddset(&set_, s);
    sigprocmask(SIG_BLOCK, &set_, &before_);
    children_ = before_;
    for (const int s : {SIGCHLD, SIGINT, SIGTERM}) sigdelset(&children_, s);
    // Where it is ignored, the system forgets how children ended.
    struct sigaction normal {};
    normal.sa_handler = SIG_DFL;
    sigaction(SIGCHLD, &normal, &child_before_);
  }
  ~SignalsHeld() {
    sigaction(SIGCHLD, &child_before_, nullptr);
    sigprocmask(SIG_SETMASK, &before_, nullptr);
  }
  SignalsHeld(const SignalsHeld&) = delete;
  SignalsHeld& operator=(const SignalsHeld&) = delete;

  /// What a child starts with.
  const sigset_t& of_children() const { return children_; }

  /// The next of them that arrives until then.
  std::optional<siginfo_t> wait(Clock::time_point until) const {
    const auto left = std::max(Clock::duration::zero(), until - Clock::now());
    const auto ns = std::chrono::duration_cast<std::chrono::nanoseconds>(left).count();
    const timespec time{static_cast<time_t>(ns / 1'000'000'000),
                        static_cast<long>(ns % 1'000'000'000)};
    siginfo_t info{};
    return sigtimedwait(&set_, &info, &time) > 0 ? std::optional(info) : std::nullopt;
  }

 private:
  sigset_t set_{};
  sigset_t before_{};
  sigset_t children_{};
  struct sigaction child_before_ {};
};

/// NULL-terminated, as exec wants it.
std::vector<char*> pointers(std::vector<std::string>& texts) {
  std::vector<char*> all;
  for (std::string& text : texts) all.push_back(text.data());
  all.push_back(nullptr);
  return all;
}

/// This process' environment with what tells a rank who it is.
std::vector<std::string> environment_of(int rank, int count, int port) {
  const std::vector<std::string> own = {cat("RANK=", rank), cat("WORLD_SIZE=", count),
                                        cat("LOCAL_RANK=", rank), "MASTER_ADDR=127.0.0.1",
                                        cat("MASTER_PORT=", port)};
  std::vector<std::string> all = own;
  for (char** e = environ; *e != nullptr; ++e) {
    const std::string inherited = *e;
    const std::string key = inherited.substr(0, inherited.find('=') + 1);
    bool replaced = false;
    for (const std::string& o : own) replaced |= o.compare(0, key.size(), key) == 0;
    if (!replaced) all.push_back(inherited);
  }
  return all;
}

/// Everything is prepared before the fork: between it and exec, only system calls are safe.
pid_t start(const std::string& program, std::vector<std::string> argv,
            std::vector<std::string> environment, const sigset_t& mask) {
  const std::vector<char*> args = pointers(argv);
  const std::vector<char*> variables = pointers(environment);
  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid != 0) return pid;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(127);  // it ended before the line above
  sigprocmask(SIG_SETMASK, &mask, nullptr);
  execve(program.c_str(), args.data(), variables.data());
  _exit(127);
}

class Children {
 public:
  explicit Children(std::chrono::milliseconds grace) : grace_(grace) {}
  ~Children() {
    signal_all(SIGKILL);
    for (const pid_t pid : running_) waitpid(pid, nullptr, 0);
  }
  Children(const Children&) = delete;
  Children& operator=(const Children&) = delete;

  void add(pid_t pid) { running_.push_back(pid); }
  bool any() const { return !running_.empty(); }
  int exit_code() const { return first_failure_; }
  Clock::time_point deadline() const {
    return kill_at_.value_or(Clock::now() + std::chrono::hours(1));
  }

  void signal_all(int signal) const {
    for (const pid_t pid : running_) kill(pid, signal);
  }

  /// Takes note of those that have ended.
  void reap() {
    std::erase_if(running_, [&](pid_t pid) {
      int status = 0;
      if (waitpid(pid, &status, WNOHANG) != pid) return false;
      const int code = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
      if (code != 0 && first_failure_ == 0) {
        first_failure_ = code;
        begin_grace();
      }
      return true;
    });
  }

  void begin_grace() {
    if (!kill_at_) kill_at_ = Clock::now() + grace_;
  }

  void kill_when_due() {
    if (kill_at_ && Clock::now() >= *kill_at_) {
      signal_all(SIGKILL);
      kill_at_ = Clock::now() + grace_;
    }
  }

 private:
  std::chrono::milliseconds grace_;
  std::vector<pid_t> running_;
  int first_failure_ = 0;
  std::optional<Clock::time_point> kill_at_;
};

}  // namespace

int launch_ranks(int count, const std::vector<std::string>& argv, const LaunchOptions& options) {
  const SignalsHeld signals;
  Children children(options.grace);
  const int port = free_tcp_port();
  for (int rank = 0; rank < count; ++rank) {
    const pid_t pid =
        start(options.program, argv, environment_of(rank, count, port), signals.of_children());
    require(pid > 0, ErrorCode::kIo, "cannot start the process of rank ", rank, ": ",
            std::strerror(errno));
    children.add(pid);
  }
  while (children.any()) {
    const auto signal = signals.wait(children.deadline());
    const bool interrupted = signal && signal->si_signo != SIGCHLD;
    // The terminal's Ctrl-C reaches the whole group of processes by itself.
    if (interrupted && signal->si_code != SI_KERNEL) children.signal_all(signal->si_signo);
    if (interrupted) children.begin_grace();
    children.reap();
    children.kill_when_due();
  }
  return children.exit_code();
}

}  // namespace uniep::tool
