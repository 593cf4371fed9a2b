#include "tune/files/shared_files.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <span>
#include <thread>

#include "base/check.h"
#include "base/destination.h"
#include "base/files.h"
#include "base/output_file.h"

namespace uniep::tune {
namespace {

constexpr const char* kDamaged = ".damaged";

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

/// 0 when the lock is had; EWOULDBLOCK: not within the limit. (A wait for it could not be ended.)
int lock_error(int file, std::chrono::milliseconds limit) {
  const auto end = std::chrono::steady_clock::now() + limit;
  while (true) {
    const int error = error_of(flock(file, LOCK_EX | LOCK_NB) == 0);
    if (error != EWOULDBLOCK && error != EINTR) return error;
    if (std::chrono::steady_clock::now() >= end) return EWOULDBLOCK;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

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
  std::string aside = path + kDamaged;
  struct stat ignored {};
  for (int i = 1; lstat(aside.c_str(), &ignored) == 0; ++i) aside = cat(path, kDamaged, ".", i);
  require_done(error_of(std::rename(path.c_str(), aside.c_str()) == 0), "move aside", path);
  return aside;
}

std::vector<std::string> files_beside(const std::string& path, std::string_view suffix) {
  namespace fs = std::filesystem;
  const std::string prefix = cat(fs::path(path).filename().string(), suffix);
  const fs::path folder = fs::path(path).has_parent_path() ? fs::path(path).parent_path() : ".";
  std::vector<std::string> files;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(folder, ignored)) {
    if (entry.path().filename().string().starts_with(prefix))
      files.push_back(entry.path().string());
  }
  std::ranges::sort(files);
  return files;
}

std::vector<std::string> damaged_files(const std::string& path) {
  return files_beside(path, kDamaged);
}

void remove_file(const std::string& path) {
  const int error = error_of(unlink(path.c_str()) == 0);
  if (error != ENOENT) require_done(error, "remove", display_name(path));
}

std::string lock_of(const std::string& path) { return behind_links(path).string() + ".lock"; }

FileLock::FileLock(const std::string& path, int limit_ms) {
  make_folder_of(path);
  file_ = Descriptor(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644));
  require_done(error_of(file_.valid()), "open the lock", path);
  const int error = lock_error(file_.get(), std::chrono::milliseconds(limit_ms));
  require(error != EWOULDBLOCK, ErrorCode::kTimeout, "another process has held the lock ", path,
          " for ", limit_ms, " ms; when that has ended, or been continued, it is free");
  require_done(error, "lock", path);
}

}  // namespace uniep::tune
