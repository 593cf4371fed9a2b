#pragma once

#include <sys/types.h>

#include <filesystem>
#include <optional>
#include <string>

namespace uniep {

/// What two paths share if they are one file: its device and inode, whatever links lead there. Of a
/// file that is not there yet: those of its folder, and its name.
struct FileIdentity {
  dev_t device = 0;
  ino_t inode = 0;
  std::string name{};  ///< in that folder; empty: the file is there

  friend bool operator==(const FileIdentity&, const FileIdentity&) = default;
};

/// Nothing for what is no regular file, such as a device, and where no file can be.
std::optional<FileIdentity> identity_of(const std::filesystem::path& path);

/// The path to which symbolic links lead from a path, dangling ones too; the path itself if it is
/// none.
std::filesystem::path behind_links(const std::filesystem::path& path);

/// The place that what is written to a path goes to.
struct Destination {
  enum class Kind {
    kFile,        ///< a new or regular file, which is replaced as a whole
    kDevice,      ///< a device, pipe or socket, which takes bytes as they come
    kDescriptor,  ///< a descriptor that this process has open, as /dev/stdout is
  };
  Kind kind = Kind::kFile;
  std::filesystem::path path{};  ///< of a file: behind all symbolic links, dangling ones too
  int descriptor = -1;
};

/// Throws Error(kIo) for a folder, and for what cannot be looked at.
Destination destination_of(const std::filesystem::path& path);

}  // namespace uniep
