#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

namespace uniep::cuda {

// Device memory that another process maps by CUDA IPC.

/// Allocations whose handle stands for nothing else are multiples of this.
inline constexpr std::int64_t kIpcBlock = 2 << 20;

/// Part of an allocation, as another process can map it. cudaIpcGetMemHandle gives the handle of
/// the whole allocation, wherever in it the address is.
struct IpcPart {
  std::string handle;
  std::int64_t offset = 0;

  /// The size of any part as bytes.
  static constexpr std::size_t kBytes = 64 + sizeof(std::int64_t);
};
std::string to_bytes(const IpcPart& part);
IpcPart ipc_part(const std::string& bytes);

/// Throws Error(kUnsupported) where the memory cannot be exported, and says what can.
IpcPart export_part(const void* address, std::int64_t bytes);

/// A part of another process' memory, mapped for this thread's current device. Mapped parts of the
/// same allocation are one mapping of it.
class MappedPart {
 public:
  MappedPart() = default;
  /// `what` ends the sentence "cannot map ..." of what goes wrong.
  MappedPart(const IpcPart& part, const std::string& what);
  MappedPart(MappedPart&& other) noexcept { *this = std::move(other); }
  MappedPart& operator=(MappedPart&& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(handle_, other.handle_);
    std::swap(address_, other.address_);
    return *this;
  }
  /// Unmaps it, and drops errors. The device that it was mapped for is current, as for `close`.
  ~MappedPart();

  /// Unmaps it, and throws errors.
  void close();

  void* address() const { return address_; }  ///< null: closed, or never mapped

 private:
  int device_ = 0;
  std::string handle_;
  void* address_ = nullptr;
};

}  // namespace uniep::cuda
