#include "base/files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <system_error>
#include <utility>

#include "base/check.h"

namespace uniep {
namespace {

// Linux moves at most this many bytes per call, whatever is asked for.
constexpr std::size_t kMaxPerCall = 0x7ffff000;

std::string reason(int error) { return std::generic_category().message(error); }

const char* kind_of(mode_t mode) {
  if (S_ISDIR(mode)) return "a directory";
  if (S_ISCHR(mode) || S_ISBLK(mode)) return "a device";
  if (S_ISFIFO(mode)) return "a pipe";
  return "no regular file";
}

/// The half-written file beside the target; removed unless it was renamed into place.
class TemporaryFile {
 public:
  explicit TemporaryFile(const std::filesystem::path& target)
      : target_(target), name_(display_name(target)) {
    static std::atomic<unsigned> counter{0};
    do {  // until no process of the same number, as containers have, has left such a file behind
      path_ = target;
      path_ += cat(".tmp-", ::getpid(), "-", counter++);
      // Not mkstemp: its file is private to the user, and the result should follow the umask.
      fd_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    } while (fd_ < 0 && errno == EEXIST);
    if (fd_ < 0) fail("cannot be created in its folder", errno);
  }
  ~TemporaryFile() {
    if (fd_ >= 0) ::close(fd_);
    if (!renamed_) ::unlink(path_.c_str());
  }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;

  void append(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      const ssize_t n = ::write(fd_, bytes.data(), std::min(bytes.size(), kMaxPerCall));
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) fail(cat("cannot be written past byte ", written_), errno);
      bytes = bytes.subspan(static_cast<std::size_t>(n));
      written_ += static_cast<std::uint64_t>(n);
    }
  }

  void commit() {
    // Some file systems report a full disk only here.
    if (::fsync(fd_) != 0) fail("cannot be flushed to the disk", errno);
    if (::close(std::exchange(fd_, -1)) != 0) fail("cannot be closed", errno);
    if (::rename(path_.c_str(), target_.c_str()) != 0) fail("cannot be moved into place", errno);
    renamed_ = true;
  }

 private:
  [[noreturn]] void fail(const std::string& what, int error) const {
    throw Error(ErrorCode::kIo, cat(name_, ": ", what, ": ", reason(error),
                                    "; a writable folder with enough free space is needed"));
  }

  std::filesystem::path target_;
  std::filesystem::path path_;
  std::string name_;
  int fd_ = -1;
  std::uint64_t written_ = 0;
  bool renamed_ = false;
};

/// Renaming onto a device such as /dev/null would replace the device itself.
void require_new_or_regular(const std::filesystem::path& path) {
  struct stat info {};
  if (::stat(path.c_str(), &info) == 0 && !S_ISREG(info.st_mode)) {
    throw Error(ErrorCode::kIo, cat(display_name(path), ": is ", kind_of(info.st_mode),
                                    "; the path of a new or regular file is needed"));
  }
}

}  // namespace

std::string display_name(const std::filesystem::path& path) {
  std::string shown;
  for (const char c : path.native()) {
    const bool control = static_cast<unsigned char>(c) < 0x20 || c == 0x7f;
    shown += control ? '?' : c;
  }
  return shown.empty() ? "(empty path)" : shown;
}

InputFile::InputFile(const std::filesystem::path& path) : name_(display_name(path)) {
  // O_NONBLOCK: opening a pipe without a writer must report it, not hang. Regular files ignore it.
  fd_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd_ < 0) {
    throw Error(ErrorCode::kIo, cat(name_, ": cannot be opened: ", reason(errno),
                                    "; the path of a readable file is needed"));
  }
  struct stat info {};
  const bool known = ::fstat(fd_, &info) == 0;
  if (!known || !S_ISREG(info.st_mode)) {
    const std::string found = known ? kind_of(info.st_mode) : reason(errno);
    ::close(fd_);
    throw Error(ErrorCode::kIo, cat(name_, ": is ", found, "; a regular file is needed"));
  }
  size_ = static_cast<std::uint64_t>(info.st_size);
}

InputFile::~InputFile() { ::close(fd_); }

void InputFile::read(std::span<std::byte> out) {
  while (!out.empty()) {
    const ssize_t n = ::read(fd_, out.data(), std::min(out.size(), kMaxPerCall));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw Error(ErrorCode::kIo, cat(name_, ": cannot be read: ", reason(errno)));
    require(n != 0, ErrorCode::kIo, name_, ": became shorter than its ", size_,
            " bytes while it was read; a file that no one writes to is needed");
    out = out.subspan(static_cast<std::size_t>(n));
  }
}

std::optional<std::string> read_text(const std::filesystem::path& path) {
  std::error_code ignored;
  if (std::filesystem::status(path, ignored).type() == std::filesystem::file_type::not_found) {
    return std::nullopt;
  }
  InputFile file(path);
  std::string text(file.size(), '\0');
  file.read(std::as_writable_bytes(std::span(text)));
  return text;
}

void require_writable(const std::filesystem::path& path) {
  require_new_or_regular(path);
  const TemporaryFile file(path);
}

void write_atomically(const std::filesystem::path& path,
                      const std::vector<std::span<const std::byte>>& parts) {
  require_new_or_regular(path);
  TemporaryFile file(path);
  for (const auto& part : parts) file.append(part);
  file.commit();
}

}  // namespace uniep
