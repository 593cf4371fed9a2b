#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/destination.h"
#include "base/temporary_file.h"

namespace uniep {

/// What is written becomes the file as a whole, or not at all: until `commit`, and if that fails,
/// the path holds what it held before. Symbolic links are followed. Devices, pipes and /dev/stdout
/// take every byte as it comes. Every failure is an Error(kIo) that names the file.
class OutputFile {
 public:
  explicit OutputFile(const std::filesystem::path& path);
  ~OutputFile();
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  void append(std::span<const std::byte> bytes);
  void commit();

 private:
  void open_device(const Destination& to);
  [[noreturn]] void fail(const std::string& what, int error) const;

  std::string name_;
  std::optional<TemporaryFile> file_;
  int descriptor_ = -1;  // of the file, or of the device
  std::uint64_t written_ = 0;
  bool replaces_ = false;
};

/// Writes the parts one after another, as an OutputFile.
void write_atomically(const std::filesystem::path& path,
                      const std::vector<std::span<const std::byte>>& parts);

/// Throws Error(kIo) where an OutputFile could not even be opened, ahead of the work whose result
/// is to go there.
void require_writable(const std::filesystem::path& path);

}  // namespace uniep
