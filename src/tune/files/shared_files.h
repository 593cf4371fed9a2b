#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/descriptor.h"

// Files that several processes read and replace, in folders that are made for them.

namespace uniep::tune {

/// Makes `path` hold `text`, as write_atomically does.
void replace_text(const std::string& path, std::string_view text);

/// Throws Error(kIo) where `path` cannot be read, if it is there, or replace_text could not begin.
void require_replaceable(const std::string& path);

/// Gives a file a name that nothing has yet: its own with ".damaged" behind it, or ".damaged.1" and
/// so on. Returns that; Error(kIo) where it cannot be moved.
std::string move_aside(const std::string& path);

/// The paths of the files that are called `path` with something behind it which begins with
/// `suffix`, by name. A folder that is missing or cannot be read has none.
std::vector<std::string> files_beside(const std::string& path, std::string_view suffix);

/// What move_aside has left beside a file.
std::vector<std::string> damaged_files(const std::string& path);

/// Removes a file: Error(kIo) where it cannot be removed. Says nothing of one that is not there.
void remove_file(const std::string& path);

/// The lock of a file, which is beside it: whatever links name the file, it has one.
std::string lock_of(const std::string& path);

inline constexpr int kLongestLockMs = 10000;  // who holds it writes a small file

/// Keeps other processes that take the same lock waiting, for at most kLongestLockMs: then theirs
/// is an Error(kTimeout). The lock is a file of its own, for the one that it guards is replaced. It
/// goes with the process that holds it.
class FileLock {
 public:
  explicit FileLock(const std::string& path, int limit_ms = kLongestLockMs);

 private:
  Descriptor file_;
};

}  // namespace uniep::tune
