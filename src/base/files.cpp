#include "base/files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

#include "base/check.h"
#include "base/quotes.h"

namespace uniep {
namespace {

/// Bytes of a path that are shown: people copy it from a sentence, so it is cut later than other
/// texts.
constexpr std::size_t kMostPathShown = 160;

}  // namespace

std::string display_name(const std::filesystem::path& path) {
  return path.empty() ? "(empty path)" : shortened(path.native(), kMostPathShown);
}

std::string error_text(int error) { return std::generic_category().message(error); }

const char* kind_of(unsigned mode) {
  if (S_ISDIR(mode)) return "a directory";
  if (S_ISCHR(mode) || S_ISBLK(mode)) return "a device";
  if (S_ISFIFO(mode)) return "a pipe";
  return S_ISREG(mode) ? "a regular file" : "no regular file";
}

InputFile::InputFile(const std::filesystem::path& path) : name_(display_name(path)) {
  // O_NONBLOCK: opening a pipe without a writer must report it, not hang. Regular files ignore it.
  fd_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd_ < 0) {
    throw Error(ErrorCode::kIo, cat(name_, ": cannot be opened: ", error_text(errno),
                                    "; the path of a readable file is needed"));
  }
  struct stat info {};
  const bool known = ::fstat(fd_, &info) == 0;
  if (!known || !S_ISREG(info.st_mode)) {
    const std::string found = known ? kind_of(info.st_mode) : error_text(errno);
    ::close(fd_);
    throw Error(ErrorCode::kIo, cat(name_, ": is ", found, "; a regular file is needed"));
  }
  size_ = static_cast<std::uint64_t>(info.st_size);
}

InputFile::~InputFile() { ::close(fd_); }

void InputFile::read(std::span<std::byte> out) {
  while (!out.empty()) {
    const ssize_t n = ::read(fd_, out.data(), std::min(out.size(), kMostPerCall));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw Error(ErrorCode::kIo, cat(name_, ": cannot be read: ", error_text(errno)));
    require(n != 0, ErrorCode::kIo, name_, ": became shorter than its ", size_,
            " bytes while it was read; a file that no one writes to is needed");
    out = out.subspan(static_cast<std::size_t>(n));
  }
}

std::optional<std::string> read_text(const std::filesystem::path& path) {
  std::error_code ignored;
  if (std::filesystem::status(path, ignored).type() == std::filesystem::file_type::not_found) {
    return std::nullopt;
  }
  InputFile file(path);
  require(file.size() <= kMostTextBytes, ErrorCode::kIo, file.name(), ": has ", file.size(),
          " bytes; a file of at most ", kMostTextBytes, " bytes is accepted");
  std::string text(file.size(), '\0');
  file.read(std::as_writable_bytes(std::span(text)));
  return text;
}

}  // namespace uniep
