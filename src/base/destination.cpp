#include "base/destination.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>

#include "base/check.h"
#include "base/files.h"

namespace uniep {
namespace {

namespace fs = std::filesystem;

// As many as Linux follows.
constexpr int kMostLinks = 40;

/// The folder that a name is looked up in.
fs::path folder_of(const fs::path& path) {
  return path.has_parent_path() ? path.parent_path() : fs::path(".");
}

bool same_file(const struct stat& a, const struct stat& b) {
  return a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

/// N of /proc/self/fd/N, however the folder is named.
std::optional<int> descriptor_named(const fs::path& path) {
  const std::string name = path.filename().string();
  int descriptor = -1;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), descriptor);
  if (error != std::errc() || end != name.data() + name.size() || descriptor < 0) return {};
  struct stat own {};
  struct stat folder {};
  const bool known = ::stat("/proc/self/fd", &own) == 0 &&
                     ::stat(folder_of(path).c_str(), &folder) == 0 && same_file(own, folder);
  return known ? std::optional(descriptor) : std::nullopt;
}

/// Standard output or error where a regular file that has another name was put in its place:
/// replaced, it would lose what this process prints.
std::optional<int> printed_to(const struct stat& file) {
  for (const int descriptor : {STDOUT_FILENO, STDERR_FILENO}) {
    struct stat open {};
    if (::fstat(descriptor, &open) == 0 && same_file(open, file)) return descriptor;
  }
  return std::nullopt;
}

/// The next path on the way that symbolic links lead; nothing: it is no link.
std::optional<fs::path> next_of(const fs::path& path) {
  std::error_code not_a_link;
  const fs::path target = fs::read_symlink(path, not_a_link);
  if (not_a_link) return std::nullopt;
  return target.is_absolute() ? target : folder_of(path) / target;
}

/// The end of that way, or the first descriptor on it.
Destination follow(fs::path path) {
  for (int links = 0; links < kMostLinks; ++links) {
    if (const auto descriptor = descriptor_named(path)) {
      return {Destination::Kind::kDescriptor, path, *descriptor};
    }
    auto next = next_of(path);
    if (!next) break;
    path = std::move(*next);
  }
  return {Destination::Kind::kFile, path, -1};
}

/// As containers are given single files; nothing can take the place of one.
bool is_mount_point(const fs::path& path) {
  struct statx info {};
  return ::statx(AT_FDCWD, path.c_str(), 0, STATX_TYPE, &info) == 0 &&
         (info.stx_attributes & STATX_ATTR_MOUNT_ROOT) != 0;
}

[[noreturn]] void fail(const fs::path& path, const std::string& problem) {
  throw Error(ErrorCode::kIo, cat(display_name(path), ": ", problem));
}

/// Why there can be no new file; the system would only say what it did not find.
void require_folder(const fs::path& path, const fs::path& file) {
  const fs::path folder = folder_of(file);
  struct stat info {};
  const int error = ::stat(folder.c_str(), &info) == 0 ? 0 : errno;
  if (error == ENOENT) {
    fail(path, cat("there is no folder ", display_name(folder), "; an existing one is needed"));
  }
  if (error != 0) {
    fail(path, cat("its folder ", display_name(folder), " cannot be used: ", error_text(error),
                   "; a folder that can be entered is needed"));
  }
  if (!S_ISDIR(info.st_mode)) {
    fail(path, cat(display_name(folder), " is ", kind_of(info.st_mode), "; a folder is needed"));
  }
}

}  // namespace

std::optional<FileIdentity> identity_of(const fs::path& path) {
  struct stat info {};
  if (::stat(path.c_str(), &info) == 0) {
    if (!S_ISREG(info.st_mode)) return std::nullopt;
    return FileIdentity{.device = info.st_dev, .inode = info.st_ino};
  }
  const fs::path file = follow(path).path;
  if (!file.has_filename() || ::stat(folder_of(file).c_str(), &info) != 0) return std::nullopt;
  return FileIdentity{
      .device = info.st_dev, .inode = info.st_ino, .name = file.filename().string()};
}

fs::path behind_links(const fs::path& path) { return follow(path).path; }

Destination destination_of(const fs::path& path) {
  if (path.empty()) fail(path, "has no name; the path of a file is needed");
  Destination way = follow(path);
  if (way.kind == Destination::Kind::kDescriptor) return way;
  struct stat info {};
  const int error = ::stat(path.c_str(), &info) == 0 ? 0 : errno;
  if (error == ENOENT && way.path.has_filename()) {
    require_folder(path, way.path);
    return way;
  }
  if (error != 0 || S_ISDIR(info.st_mode)) {
    if (error == EACCES || error == ENOTDIR) require_folder(path, way.path);
    fail(path, cat(error == 0 ? "is a directory" : error_text(error),
                   "; the path of a new or regular file is needed"));
  }
  if (!S_ISREG(info.st_mode)) return {Destination::Kind::kDevice, path, -1};
  if (const auto printed = printed_to(info)) {
    return {Destination::Kind::kDescriptor, path, *printed};
  }
  if (is_mount_point(path)) {
    fail(path,
         "is mounted as a single file, which cannot be replaced; a file in a mounted folder "
         "is needed");
  }
  return way;
}

}  // namespace uniep
