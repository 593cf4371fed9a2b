#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace uniep {

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

/// What a regular file holds; nothing where there is none. Error(kIo) as of InputFile.
std::optional<std::string> read_text(const std::filesystem::path& path);

/// Writes the parts one after another so that `path` holds either all of them or what it held
/// before, whoever reads meanwhile: into a temporary file of the same folder, flushed to the disk,
/// then renamed.
void write_atomically(const std::filesystem::path& path,
                      const std::vector<std::span<const std::byte>>& parts);

/// Throws Error(kIo) where write_atomically could not even begin, ahead of the work whose result is
/// to go there.
void require_writable(const std::filesystem::path& path);

}  // namespace uniep
