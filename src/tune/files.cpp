#include "tune/files.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>

#include "base/check.h"

namespace uniep::tune {
namespace {

void make_folder_of(const std::string& path) {
  const std::filesystem::path folder = std::filesystem::path(path).parent_path();
  std::error_code error;
  if (!folder.empty()) std::filesystem::create_directories(folder, error);
  require(!error, ErrorCode::kIo, "cannot make the folder of ", path, ": ", error.message());
}

void require_done(bool done, const char* what, const std::string& path) {
  require(done, ErrorCode::kIo, "cannot ", what, ' ', path, ": ", std::strerror(errno));
}

class OpenFile {
 public:
  explicit OpenFile(int file) : file_(file) {}
  ~OpenFile() {
    if (file_ >= 0) close(file_);
  }
  OpenFile(const OpenFile&) = delete;
  OpenFile& operator=(const OpenFile&) = delete;

  int operator*() const { return file_; }

 private:
  int file_;
};

/// A folder opens like a file, a device gives what nobody stored.
void require_regular(int file, const std::string& path) {
  struct stat status {};
  require_done(fstat(file, &status) == 0, "read", path);
  require(S_ISREG(status.st_mode), ErrorCode::kIo, "cannot read ", path, ": it is a ",
          S_ISDIR(status.st_mode) ? "folder" : "special file", "; a regular file is accepted");
}

/// A new file in the folder of `path`, whose name it gives.
int make_beside(const std::string& path, std::string& temporary) {
  make_folder_of(path);
  temporary = path + ".XXXXXX";
  const int file = mkstemp(temporary.data());
  require_done(file >= 0, "write beside", path);
  return file;
}

}  // namespace

std::optional<std::string> read_text(const std::string& path) {
  // A pipe without a writer must not keep us waiting.
  const OpenFile file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (*file < 0 && (errno == ENOENT || errno == ENOTDIR)) return std::nullopt;
  require_done(*file >= 0, "read", path);
  require_regular(*file, path);
  std::string text;
  char block[1 << 14];
  for (ssize_t n = 1; n != 0;) {
    n = ::read(*file, block, sizeof block);
    require_done(n >= 0 || errno == EINTR, "read", path);
    if (n > 0) text.append(block, static_cast<std::size_t>(n));
  }
  return text;
}

void require_replaceable(const std::string& path) {
  read_text(path);  // what cannot be read is not replaced
  std::string temporary;
  close(make_beside(path, temporary));
  unlink(temporary.c_str());
}

std::string move_aside(const std::string& path) {
  std::string aside = path + ".damaged";
  struct stat ignored {};
  for (int i = 1; lstat(aside.c_str(), &ignored) == 0; ++i) aside = cat(path, ".damaged.", i);
  require_done(std::rename(path.c_str(), aside.c_str()) == 0, "move aside", path);
  return aside;
}

void replace_text(const std::string& path, std::string_view text) {
  std::string temporary;
  const int file = make_beside(path, temporary);
  std::size_t written = 0;
  bool ok = true;
  while (ok && written < text.size()) {
    const ssize_t n = ::write(file, text.data() + written, text.size() - written);
    ok = n >= 0 || errno == EINTR;
    if (n > 0) written += static_cast<std::size_t>(n);
  }
  ok = ok && fchmod(file, 0644) == 0 && fsync(file) == 0;
  ok = close(file) == 0 && ok;
  ok = ok && std::rename(temporary.c_str(), path.c_str()) == 0;
  if (!ok) {
    const int error = errno;
    unlink(temporary.c_str());
    errno = error;
  }
  require_done(ok, "write", path);
}

FileLock::FileLock(const std::string& path) {
  make_folder_of(path);
  file_ = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  require_done(file_ >= 0, "open the lock", path);
  int locked = 0;
  do {
    locked = flock(file_, LOCK_EX);
  } while (locked != 0 && errno == EINTR);
  if (locked != 0) close(file_);
  require_done(locked == 0, "lock", path);
}

FileLock::~FileLock() { close(file_); }

}  // namespace uniep::tune
