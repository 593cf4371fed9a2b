#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>

namespace uniep {

// Linux moves at most this many bytes per call, whatever is asked for.
inline constexpr std::size_t kMostPerCall = 0x7ffff000;

/// The largest file that is read as a text: JSON takes many times its size in memory.
inline constexpr std::uint64_t kMostTextBytes = std::uint64_t{64} << 20;

/// A path as error texts show it: on one line, the middle left out of
/// a very long one.
std::string display_name(const std::filesystem::path& path);

/// The system's words for an errno.
std::string error_text(int error);

/// "a directory": of a file's mode.
const char* kind_of(unsigned mode);

/// A regular file opened for reading. Every failure is an Error(kIo) that names the file.
class InputFile {
 public:
  explicit InputFile(const std::filesystem::path& path);
  ~InputFile();
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  const std::string& name() const { return name_; }
  std::uint64_t size() const { return size_; }

  /// Fills `out` with the next bytes; a file that ends before that is an error.
  void read(std::span<std::byte> out);

 private:
  std::string name_;
  int fd_ = -1;
  std::uint64_t size_ = 0;
};

/// What a regular file of at most kMostTextBytes holds; nothing where there is none. Error(kIo) as
/// of InputFile, and for a larger one.
std::optional<std::string> read_text(const std::filesystem::path& path);

}  // namespace uniep
