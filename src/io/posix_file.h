#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

namespace uniep::io {

/// A path as error texts show it: control characters are escaped, so a sentence stays on one line.
std::string display_name(const std::filesystem::path& path);

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

/// Writes the parts one after another so that `path` holds either all of them or what it held
/// before: into a temporary file of the same folder, flushed to the disk, then renamed.
void write_atomically(const std::filesystem::path& path,
                      const std::vector<std::span<const std::byte>>& parts);

}  // namespace uniep::io
