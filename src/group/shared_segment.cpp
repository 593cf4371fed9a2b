#include "group/shared_segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "base/check.h"

namespace uniep {
namespace {

constexpr char kMagic[8] = {'u', 'n', 'i', 'e', 'p', 's', 'e', 'g'};
constexpr std::uint32_t kVersion = 1;  // of the header, and of what lies behind it
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

struct Header {
  char magic[8];
  std::uint32_t version;
  std::uint32_t header_bytes;
  SegmentIdentity identity;
};
static_assert(sizeof(Header) <= SharedSegment::kHeaderBytes);

std::int64_t file_bytes(const SegmentIdentity& identity) {
  return SharedSegment::kHeaderBytes + identity.bytes;
}

/// The file of a rank's segment, for sentences that are seen on all ranks.
std::string place(pid_t pid, int descriptor) { return cat("/proc/", pid, "/fd/", descriptor); }

template <class... Args>
void accept(bool ok, const SegmentIdentity& expected, const Args&... why) {
  require(ok, ErrorCode::kIo, "the shared memory of rank ", expected.rank, " ", cat(why...),
          "; what that rank made for this group is accepted");
}

/// What would do where a file could not be opened: `otherwise`, unless there are too many.
const char* remedy(int error, const char* otherwise) {
  const bool too_many = error == EMFILE || error == ENFILE;
  return too_many ? "more of them (ulimit -n) are accepted" : otherwise;
}

}  // namespace

void check_segment(int file, const SegmentIdentity& expected) {
  struct stat status {};
  accept(fstat(file, &status) == 0 && S_ISREG(status.st_mode), expected, "is not a file");
  Header header{};
  const ssize_t n = pread(file, &header, sizeof(header), 0);
  accept(n == static_cast<ssize_t>(sizeof(header)), expected, "has ", status.st_size,
         " bytes, too few for a header");
  accept(std::memcmp(header.magic, kMagic, sizeof(kMagic)) == 0, expected,
         "does not begin as a segment of uniep does");
  accept(header.version == kVersion && header.header_bytes == sizeof(header), expected,
         "has version ", header.version, " of the header, and this process reads version ",
         kVersion);
  const SegmentIdentity& found = header.identity;
  accept(found.group == expected.group, expected, "is of another group");
  accept(found.rank == expected.rank, expected, "says that rank ", found.rank, " made it");
  accept(found.size == expected.size, expected, "is of a group of ", found.size, " ranks, not ",
         expected.size);
  accept(found.number == expected.number, expected, "is segment ", found.number, ", not ",
         expected.number);
  accept(found.bytes == expected.bytes, expected, "says that it has ", found.bytes, " bytes, not ",
         expected.bytes);
  accept(status.st_size == file_bytes(expected), expected, "has ", status.st_size,
         " bytes with its header, not ", file_bytes(expected));
  const int seals = fcntl(file, F_GET_SEALS);
  accept(seals >= 0 && (seals & kSeals) == kSeals, expected, "could be cut short");
}

SharedSegment::SharedSegment(const SegmentIdentity& identity)
    : identity_(identity),
      file_(memfd_create(cat("uniep:rank", identity.rank, ":", identity.number).c_str(),
                         MFD_CLOEXEC | MFD_ALLOW_SEALING)) {
  const bool made = file_.valid() && ftruncate(file_.get(), file_bytes(identity)) == 0;
  const int error = errno;
  require(made, ErrorCode::kCapacity, "cannot allocate ", identity.bytes,
          " bytes of shared memory (", std::strerror(error), "); ",
          remedy(error, "a smaller max_tokens or capacity_rows needs less"));
  map();
  Header header{
      .magic = {}, .version = kVersion, .header_bytes = sizeof(Header), .identity = identity};
  std::memcpy(header.magic, kMagic, sizeof(kMagic));
  std::memcpy(memory_, &header, sizeof(header));
  ensure(fcntl(file_.get(), F_ADD_SEALS, kSeals) == 0, "shared memory cannot be sealed");
}

SharedSegment::SharedSegment(pid_t pid, int descriptor, const SegmentIdentity& expected)
    : identity_(expected) {
  const std::string path = place(pid, descriptor);
  // Looked at before it is opened: to open a pipe or a device may have effects.
  struct stat status {};
  const bool found = stat(path.c_str(), &status) == 0;
  if (found) accept(S_ISREG(status.st_mode), expected, "is not a file");
  if (found) file_ = Descriptor(open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOCTTY));
  const int error = errno;
  require(file_.valid(), ErrorCode::kUnsupported, "cannot open the shared memory of rank ",
          expected.rank, " (", path, ": ", std::strerror(error), "); ",
          remedy(error, "processes of one user that see each other in /proc are accepted"));
  check_segment(file_.get(), expected);
  map();
  file_.close();
}

void SharedSegment::map() {
  void* p = mmap(nullptr, static_cast<std::size_t>(file_bytes(identity_)), PROT_READ | PROT_WRITE,
                 MAP_SHARED | MAP_NORESERVE, file_.get(), 0);
  require(p != MAP_FAILED, ErrorCode::kCapacity, "cannot map ", identity_.bytes,
          " bytes of shared memory; a smaller max_tokens or capacity_rows needs less");
  memory_ = static_cast<std::byte*>(p);
}

SharedSegment::~SharedSegment() {
  if (memory_ != nullptr) munmap(memory_, static_cast<std::size_t>(file_bytes(identity_)));
}

}  // namespace uniep
