#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace uniep::tune {

/// What a regular file holds; nothing where there is none. Error(kIo) where it cannot be read, or
/// is something else.
std::optional<std::string> read_text(const std::string& path);

/// Makes `path` hold `text`, whole or not at all, whoever reads meanwhile and whatever breaks: a
/// new file takes the place of the old one. Makes the folders that are missing.
void replace_text(const std::string& path, std::string_view text);

/// Throws Error(kIo) where replace_text could not work, before the work whose result is to go
/// there. Makes the folders that are missing.
void require_replaceable(const std::string& path);

/// Gives a file a name that nothing has yet: its own with ".damaged" behind it, or ".damaged.1" and
/// so on. Returns that; Error(kIo) where it cannot be moved.
std::string move_aside(const std::string& path);

/// Keeps other processes that take the same lock waiting. The lock is a file of its own, for the
/// one that it guards is replaced. It goes with the process that holds it.
class FileLock {
 public:
  explicit FileLock(const std::string& path);
  ~FileLock();
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;

 private:
  int file_;
};

}  // namespace uniep::tune
