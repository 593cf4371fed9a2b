#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>

#include "base/descriptor.h"

namespace uniep {

/// Which segment this is: what its header says, and what a peer expects of it.
struct SegmentIdentity {
  std::uint64_t group = 0;   ///< the group's number, by chance
  std::int32_t rank = 0;     ///< who made it
  std::int32_t size = 0;     ///< of the group
  std::uint64_t number = 0;  ///< among those that the rank made for the group
  std::int64_t bytes = 0;    ///< of content

  bool operator==(const SegmentIdentity&) const = default;
};

/// Memory that processes of a host share: a file that exists in memory only, has no name anywhere,
/// and is gone when the last process that maps it is. It cannot be cut short, so nobody who maps it
/// gets a SIGBUS. Peers open it through /proc, and check its header before they map it.
class SharedSegment {
 public:
  static constexpr std::int64_t kHeaderBytes = 4096;

  /// Makes one, zeroed. Throws Error(kCapacity).
  explicit SharedSegment(const SegmentIdentity& identity);
  /// Maps what process `pid` has open as `descriptor`. Throws Error(kUnsupported) where it cannot
  /// be opened, Error(kIo) where it is not that segment.
  SharedSegment(pid_t pid, int descriptor, const SegmentIdentity& expected);
  ~SharedSegment();
  SharedSegment(const SharedSegment&) = delete;
  SharedSegment& operator=(const SharedSegment&) = delete;

  const SegmentIdentity& identity() const { return identity_; }
  std::byte* content() const { return memory_ + kHeaderBytes; }
  int descriptor() const { return file_.get(); }
  /// No more peers can open it.
  void close() { file_.close(); }

 private:
  void map();

  const SegmentIdentity identity_;
  Descriptor file_;
  std::byte* memory_ = nullptr;
};

/// Throws Error(kIo) unless the file is the expected segment, whole and sealed against shrinking.
void check_segment(int file, const SegmentIdentity& expected);

}  // namespace uniep
