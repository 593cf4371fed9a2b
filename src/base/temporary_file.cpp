#include "base/temporary_file.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "base/files.h"

namespace uniep {
namespace {

namespace fs = std::filesystem;

fs::path folder_of(const fs::path& path) {
  return path.has_parent_path() ? path.parent_path() : fs::path(".");
}

[[noreturn]] void fail(const fs::path& target, const char* what, int error) {
  throw Error(ErrorCode::kIo, cat(display_name(target), ": ", what, ": ", error_text(error),
                                  "; a writable folder with enough free space is needed"));
}

/// How this process refers to a file of its own that has no name.
std::string path_of_descriptor(int descriptor) { return cat("/proc/self/fd/", descriptor); }

/// The one name that a signal removes. A handler can use no lock: who sets `used` owns the rest.
struct NameForSignals {
  static constexpr std::array kSignals{SIGINT, SIGTERM, SIGHUP};

  std::atomic<bool> used{false};
  std::atomic<bool> armed{false};
  char path[PATH_MAX]{};
  std::array<struct sigaction, kSignals.size()> before{};
};
NameForSignals name_for_signals;
static_assert(std::atomic<bool>::is_always_lock_free);

void remove_name_and_end(int signal) {
  if (name_for_signals.armed) ::unlink(name_for_signals.path);
  ::signal(signal, SIG_DFL);
  ::raise(signal);
}

/// A signal that someone handles or ignores does not end the process, and is left alone.
void handle_signals_that_end_the_process() {
  for (std::size_t i = 0; i < NameForSignals::kSignals.size(); ++i) {
    const int signal = NameForSignals::kSignals[i];
    ::sigaction(signal, nullptr, &name_for_signals.before[i]);
    if (name_for_signals.before[i].sa_handler != SIG_DFL) continue;
    struct sigaction action {};
    action.sa_handler = remove_name_and_end;
    ::sigaction(signal, &action, nullptr);
  }
}

void handle_signals_as_before() {
  for (std::size_t i = 0; i < NameForSignals::kSignals.size(); ++i) {
    struct sigaction now {};
    ::sigaction(NameForSignals::kSignals[i], nullptr, &now);
    if (now.sa_handler != remove_name_and_end) continue;
    ::sigaction(NameForSignals::kSignals[i], &name_for_signals.before[i], nullptr);
  }
}

}  // namespace

void TemporaryName::choose(const fs::path& target) {
  static std::atomic<unsigned> counter{0};
  // Not the target's name with something behind it: that may be too long for a name.
  path_ = folder_of(target) / cat(".uniep.tmp-", ::getpid(), "-", counter++);
  errno = 0;
}

bool TemporaryName::is_taken(const fs::path& target) const {
  if (errno == EEXIST) return true;  // left by a process of the same number, as containers have
  fail(target, "no file can be created in its folder", errno);
}

void TemporaryName::keep_from_signals() {
  exists_ = true;
  if (path_.size() >= sizeof name_for_signals.path || name_for_signals.used.exchange(true)) return;
  signals_remove_ = true;
  std::strcpy(name_for_signals.path, path_.c_str());
  name_for_signals.armed = true;
  handle_signals_that_end_the_process();
}

void TemporaryName::forget() {
  exists_ = false;
  if (!std::exchange(signals_remove_, false)) return;
  handle_signals_as_before();
  name_for_signals.armed = false;
  name_for_signals.used = false;
}

TemporaryName::~TemporaryName() {
  if (!exists_) return;
  ::unlink(path_.c_str());
  forget();
}

void TemporaryName::rename_to(const fs::path& target) {
  if (::rename(path_.c_str(), target.c_str()) != 0) fail(target, "cannot be replaced", errno);
  forget();
}

TemporaryFile::TemporaryFile(const fs::path& target, Naming naming) : target_(target) {
  if (naming == Naming::kNamed || !open_unnamed()) open_named();
}

TemporaryFile::~TemporaryFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

bool TemporaryFile::open_unnamed() {
  const int descriptor = ::open(folder_of(target_).c_str(), O_TMPFILE | O_WRONLY | O_CLOEXEC, 0666);
  if (descriptor < 0) return false;
  // Without /proc it could never be given a name.
  if (::access(path_of_descriptor(descriptor).c_str(), F_OK) != 0) {
    ::close(descriptor);
    return false;
  }
  descriptor_ = descriptor;
  return true;
}

void TemporaryFile::open_named() {
  name_.emplace(target_, [&](const std::string& path) {
    // Not mkstemp: its file is private to the user, and the result should follow the umask.
    descriptor_ = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    return descriptor_ >= 0;
  });
}

void TemporaryFile::take_over_owner_and_mode() {
  struct stat earlier {};
  if (::stat(target_.c_str(), &earlier) != 0) return;
  // Who may not give files away owns the new one, as a copy.
  const bool given = ::fchown(descriptor_, earlier.st_uid, earlier.st_gid) == 0;
  const mode_t set_id = S_ISUID | S_ISGID;
  ::fchmod(descriptor_, earlier.st_mode & (given ? 07777 : 07777 & ~set_id));
}

void TemporaryFile::publish() {
  take_over_owner_and_mode();
  // Some file systems report a full disk only here.
  if (::fsync(descriptor_) != 0) fail(target_, "cannot be flushed to the disk", errno);
  if (!name_) {
    const std::string own = path_of_descriptor(descriptor_);
    const auto link_to = [&](const std::string& path) {
      return ::linkat(AT_FDCWD, own.c_str(), AT_FDCWD, path.c_str(), AT_SYMLINK_FOLLOW) == 0;
    };
    // A link cannot take the place of a file, only a name can; it lives for two system calls.
    if (!link_to(target_.string())) {
      if (errno != EEXIST) fail(target_, "cannot be created", errno);
      name_.emplace(target_, link_to);
    }
  }
  if (::close(std::exchange(descriptor_, -1)) != 0) fail(target_, "cannot be closed", errno);
  if (name_) name_->rename_to(target_);
}

}  // namespace uniep
