#include "common/launcher.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <iostream>
#include <memory>
#include <optional>

#include "base/check.h"
#include "base/deadline.h"
#include "commands.h"
#include "group/tcp_bootstrap.h"

extern char** environ;

namespace uniep::tool {
namespace {

constexpr int kNotStarted = 127;  // as the shell has it

/// Keeps the signals that a launcher waits for from being delivered meanwhile.
class SignalsHeld {
 public:
  SignalsHeld() {
    sigemptyset(&set_);
    for (const int s : {SIGCHLD, SIGINT, SIGTERM}) sigaddset(&set_, s);
    sigprocmask(SIG_BLOCK, &set_, &before_);
    children_ = before_;
    for (const int s : {SIGCHLD, SIGINT, SIGTERM}) sigdelset(&children_, s);
    // If SIGCHLD is ignored, the system forgets how children ended.
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
  std::optional<siginfo_t> wait(Deadline until) const {
    const auto ns = std::chrono::nanoseconds(until.remaining()).count();
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

/// What a rank writes to stderr, kept until all have ended.
class Said {
 public:
  Said() : file_(memfd_create("uniep-said", MFD_CLOEXEC)) {}
  ~Said() {
    if (kept()) close(file_);
  }
  Said(const Said&) = delete;
  Said& operator=(const Said&) = delete;

  /// Or the system has no memory for it, and the rank writes where this process does.
  bool kept() const { return file_ >= 0; }
  int file() const { return file_; }

  void print() const {
    std::array<char, 4096> part;
    off_t at = 0;
    for (ssize_t size = 1; kept() && size > 0; at += size) {
      size = pread(file_, part.data(), part.size(), at);
      if (size > 0) std::cerr.write(part.data(), size);
    }
  }

 private:
  int file_;
};

/// Everything is prepared before the fork: between it and exec, only system calls are safe. The
/// child's stderr is that file; -1: this process'.
pid_t start(const std::string& program, std::vector<std::string> argv,
            std::vector<std::string> environment, const sigset_t& mask, int stderr_file) {
  const std::vector<char*> args = pointers(argv);
  const std::vector<char*> variables = pointers(environment);
  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid != 0) return pid;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(kNotStarted);  // it ended before the line above
  if (stderr_file >= 0) dup2(stderr_file, STDERR_FILENO);
  sigprocmask(SIG_SETMASK, &mask, nullptr);
  execve(program.c_str(), args.data(), variables.data());
  _exit(kNotStarted);
}

class Children {
 public:
  /// `command` begins its sentences.
  Children(std::string command, const LaunchOptions& options)
      : command_(std::move(command)), options_(options) {}
  ~Children() {
    signal_all(SIGKILL);
    for (const pid_t pid : running_) waitpid(pid, nullptr, 0);
  }
  Children(const Children&) = delete;
  Children& operator=(const Children&) = delete;

  void add(pid_t pid, std::unique_ptr<Said> said) {
    running_.push_back(pid);
    by_rank_.push_back({pid, 0, std::move(said)});
  }
  bool any() const { return !running_.empty(); }
  int exit_code() const { return first_failure_; }
  Deadline deadline() const { return kill_at_.value_or(Deadline::in(std::chrono::hours(1))); }

  void signal_all(int signal) const {
    for (const pid_t pid : running_) kill(pid, signal);
  }

  /// Takes note of those that have ended.
  void reap() {
    std::erase_if(running_, [&](pid_t pid) {
      int status = 0;
      if (waitpid(pid, &status, WNOHANG) != pid) return false;
      int code = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
      if (code == kNotStarted) code = kExitFailed;
      const auto rank = std::ranges::find(by_rank_, pid, &Child::pid) - by_rank_.begin();
      by_rank_[rank].code = code;
      if (!kill_at_) tell_of_silent_end(rank, status);
      if (code != 0 && first_failure_ == 0) {
        first_failure_ = code;
        kill_in(options_.grace);
      }
      return true;
    });
  }

  /// Ctrl-C on a terminal reaches the launcher and the ranks at once.
  void interrupt(const siginfo_t& signal) {
    if (signal.si_code != SI_KERNEL) signal_all(signal.si_signo);
    kill_in(interrupted_ ? options_.grace : options_.interrupted_grace);
    interrupted_ = true;
  }

  /// What ranks other than the first had to say, but for what that one has refused already: all
  /// refuse the same with the same words.
  void tell_what_others_said() const {
    for (const Child& child : by_rank_) {
      const bool refused_too = child.code == kExitBadInput && by_rank_[0].code == kExitBadInput;
      if (child.said && !refused_too) child.said->print();
    }
  }

  void kill_when_due() {
    if (kill_at_ && kill_at_->expired()) {
      signal_all(SIGKILL);
      kill_at_ = Deadline::in(options_.grace);
    }
  }

 private:
  /// Or earlier, if that was said before.
  void kill_in(Deadline::Clock::duration time) {
    const auto at = Deadline::in(time);
    kill_at_ = std::min(kill_at_.value_or(at), at);
  }

  /// The signal that ended a process, or that it took note of and ended itself (Interrupt); or 0.
  static int signal_of(int status) {
    if (WIFSIGNALED(status)) return WTERMSIG(status);
    const int noted = WEXITSTATUS(status) - 128;
    return noted == SIGINT || noted == SIGTERM ? noted : 0;
  }

  /// Tells how the first rank that fails ended, if it could not say so itself.
  void tell_of_silent_end(std::ptrdiff_t rank, int status) const {
    if (const int signal = signal_of(status); signal != 0) {
      std::cerr << cat(command_, ": the process of rank ", rank, " was ended by signal ", signal,
                       " (", ::strsignal(signal), ")\n");
    } else if (WEXITSTATUS(status) == kNotStarted) {
      std::cerr << cat(command_, ": the process of rank ", rank,
                       " could not be started; a higher limit of memory may do\n");
    }
  }

  struct Child {
    pid_t pid;
    int code;
    std::unique_ptr<Said> said;  // none: it writes to this process' stderr at once
  };

  std::string command_;
  LaunchOptions options_;
  std::vector<pid_t> running_;
  std::vector<Child> by_rank_;
  int first_failure_ = 0;
  bool interrupted_ = false;
  std::optional<Deadline> kill_at_;
};

}  // namespace

int launch_ranks(int count, const std::vector<std::string>& argv, const LaunchOptions& options) {
  const bool found = access(options.program.c_str(), X_OK) == 0;
  const int error = found ? 0 : errno;
  require(found, ErrorCode::kIo, "cannot start processes: ", options.program, ": ",
          std::strerror(error), "; a program that can be run, and /proc, are needed");
  const SignalsHeld signals;
  Children children(argv.size() < 2 ? "uniep" : "uniep " + argv[1], options);
  const int port = free_tcp_port();
  for (int rank = 0; rank < count; ++rank) {
    auto said = rank == 0 ? nullptr : std::make_unique<Said>();
    const pid_t pid = start(options.program, argv, environment_of(rank, count, port),
                            signals.of_children(), said ? said->file() : -1);
    require(pid > 0, ErrorCode::kIo, "cannot start the process of rank ", rank, ": ",
            std::strerror(errno),
            "; fewer ranks, or a higher limit of processes (ulimit -u), are accepted");
    children.add(pid, std::move(said));
  }
  while (children.any()) {
    const auto signal = signals.wait(children.deadline());
    if (signal && signal->si_signo != SIGCHLD) children.interrupt(*signal);
    children.reap();
    children.kill_when_due();
  }
  children.tell_what_others_said();
  return children.exit_code();
}

}  // namespace uniep::tool
