#include "base/output_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "base/check.h"
#include "base/files.h"

namespace uniep {
namespace {

/// Replacing a file takes no more than a folder that can be written; a file that is protected
/// should stay as it is all the same.
void require_unprotected(const std::filesystem::path& path) {
  const bool writable = ::faccessat(AT_FDCWD, path.c_str(), W_OK, AT_EACCESS) == 0;
  const int error = writable ? 0 : errno;
  require(writable || error == ENOENT, ErrorCode::kIo, display_name(path),
          ": cannot be written: ", error_text(error), "; a writable file is needed");
}

}  // namespace

OutputFile::OutputFile(const std::filesystem::path& path) : name_(display_name(path)) {
  const Destination to = destination_of(path);
  if (to.kind != Destination::Kind::kFile) {
    open_device(to);
    return;
  }
  require_unprotected(to.path);
  std::error_code ignored;
  replaces_ = std::filesystem::exists(to.path, ignored);
  descriptor_ = file_.emplace(to.path).descriptor();
}

OutputFile::~OutputFile() {
  if (!file_ && descriptor_ >= 0) ::close(descriptor_);
}

void OutputFile::open_device(const Destination& to) {
  descriptor_ = to.kind == Destination::Kind::kDescriptor
                    ? ::fcntl(to.descriptor, F_DUPFD_CLOEXEC, 0)
                    : ::open(to.path.c_str(), O_WRONLY | O_CLOEXEC | O_NOCTTY);
  if (descriptor_ < 0) fail("cannot be opened", errno);
}

void OutputFile::append(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t n = ::write(descriptor_, bytes.data(), std::min(bytes.size(), kMostPerCall));
    const int error = n < 0 ? errno : 0;  // before anything else could change it
    if (error == EINTR) continue;
    if (error != 0) fail(cat("cannot be written past byte ", written_), error);
    bytes = bytes.subspan(static_cast<std::size_t>(n));
    written_ += static_cast<std::uint64_t>(n);
  }
}

void OutputFile::commit() {
  if (file_) {
    file_->publish();
  } else if (::close(std::exchange(descriptor_, -1)) != 0) {
    fail("cannot be closed", errno);
  }
}

void OutputFile::fail(const std::string& what, int error) const {
  throw Error(ErrorCode::kIo,
              cat(name_, ": ", what, ": ", error_text(error), "; enough free space is needed",
                  replaces_ ? ", and the earlier file is kept as it was" : ""));
}

void write_atomically(const std::filesystem::path& path,
                      const std::vector<std::span<const std::byte>>& parts) {
  OutputFile file(path);
  for (const auto& part : parts) file.append(part);
  file.commit();
}

void require_writable(const std::filesystem::path& path) {
  const Destination to = destination_of(path);
  if (to.kind == Destination::Kind::kDescriptor) return;
  require_unprotected(to.path);
  // A pipe is not opened: its reader would take the end of this for the end of the output.
  if (to.kind == Destination::Kind::kFile) const TemporaryFile probe(to.path);
}

}  // namespace uniep
