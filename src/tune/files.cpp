#include "tune/files.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>

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

}  // namespace

std::optional<std::string> read_text(const std::string& path) {
  std::error_code ignored;
  if (!std::filesystem::exists(path, ignored)) return std::nullopt;
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(file), {}};
  require_done(!file.bad() && file.is_open() && errno == 0, "read", path);
  return text;
}

void replace_text(const std::string& path, std::string_view text) {
  make_folder_of(path);
  std::string temporary = path + ".XXXXXX";
  const int file = mkstemp(temporary.data());
  require_done(file >= 0, "write beside", path);
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
