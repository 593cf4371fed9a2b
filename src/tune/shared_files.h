#pragma once

#include <string>
#include <string_view>

// Files that several processes read and replace, in folders that are made for them.

namespace uniep::tune {

/// Makes `path` hold `text`, as write_atomically does.
void replace_text(const std::string& path, std::string_view text);

/// Throws Error(kIo) where `path` cannot be read, if it is there, or replace_text could not begin.
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
