#include "tune/shared_files.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <span>

#include "base/check.h"
#include "base/files.h"
#include "base/output_file.h"

namespace uniep::tune {
namespace {

void make_folder_of(const std::string& path) {
  const std::filesystem::path folder = std::filesystem::path(path).parent_path();
  std::error_code error;
  if (!folder.empty()) std::filesystem::create_directories(folder, error);
  require(!error, ErrorCode::kIo, "cannot make the folder of ", path, ": ", error.message());
}

/// `error` is the errno of what failed, taken before anything else could change it.
void require_done(int error, const char* what, const std::string& path) {
  require(error == 0, ErrorCode::kIo, "cannot ", what, ' ', path, ": ", error_text(error));
}

int error_of(bool done) { return done ? 0 : errno; }

}  // namespace

void replace_text(const std::string& path, std::string_view text) {
  make_folder_of(path);
  write_atomically(path, {std::as_bytes(std::span(text))});
}

void require_replaceable(const std::string& path) {
  read_text(path);  // what cannot be read is not replaced
  make_folder_of(path);
  require_writable(path);
}

std::string move_aside(const std::string& path) {
  std::string aside = path + ".damaged";
  struct stat ignored {};
  for (int i = 1; lstat(aside.c_str(), &ignored) == 0; ++i) aside = cat(path, ".damaged.", i);
  require_done(error_of(std::rename(path.c_str(), aside.c_str()) == 0), "move aside", path);
  return aside;
}

FileLock::FileLock(const std::string& path) {
  make_folder_of(path);
  file_ = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  require_done(error_of(file_ >= 0), "open the lock", path);
  int locked = 0;
  do {
    locked = flock(file_, LOCK_EX);
  } while (locked != 0 && errno == EINTR);
  const int error = error_of(locked == 0);
  if (error != 0) close(file_);
  require_done(error, "lock", path);
}

FileLock::~FileLock() { close(file_); }

}  // namespace uniep::tune
