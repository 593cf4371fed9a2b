#include "group/cuda/ipc_memory.h"

#include <cstring>

#include "base/cuda/check_cuda.h"
#include "base/cuda/device_scope.h"
#include "base/cuda/driver.h"
#include "group/cuda/handle_cache.h"

namespace uniep::cuda {
namespace {

void* open_handle(const std::string& bytes) {
  cudaIpcMemHandle_t handle{};
  std::memcpy(handle.reserved, bytes.data(), sizeof(handle.reserved));
  void* address = nullptr;
  check_cuda(cudaIpcOpenMemHandle(&address, handle, cudaIpcMemLazyEnablePeerAccess),
             "open a CUDA IPC handle");
  return address;
}

void close_handle(void* address) {
  check_cuda(cudaIpcCloseMemHandle(address), "close a CUDA IPC handle");
}

HandleCache& opened_handles() {
  static auto* cache =  // outlives static objects that hold memory
      new HandleCache({.open = open_handle, .close = close_handle});
  return *cache;
}

/// Memory of cudaMalloc can be exported; that of pools, and what is mapped piece by piece, cannot.
void require_exportable(const void* address) {
  const auto pointer = reinterpret_cast<CUdeviceptr>(address);
  int capable = 0;
  const CUresult result =
      pointer_get_attribute()(&capable, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, pointer);
  require(
      result == CUDA_SUCCESS && capable != 0, ErrorCode::kUnsupported, "the memory at ", address,
      " cannot be shared with other processes by CUDA IPC; memory of "
      "cudaMalloc is accepted (PyTorch's with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False "
      "and without cudaMallocAsync), or none, and uniep allocates it");
}

}  // namespace

std::string to_bytes(const IpcPart& part) {
  std::string bytes = part.handle;
  bytes.append(reinterpret_cast<const char*>(&part.offset), sizeof(part.offset));
  ensure(bytes.size() == IpcPart::kBytes, "a handle of ", part.handle.size(), " bytes");
  return bytes;
}

IpcPart ipc_part(const std::string& bytes) {
  ensure(bytes.size() == IpcPart::kBytes, "an IPC part of ", bytes.size(), " bytes");
  IpcPart part;
  part.handle = bytes.substr(0, bytes.size() - sizeof(part.offset));
  std::memcpy(&part.offset, bytes.data() + part.handle.size(), sizeof(part.offset));
  return part;
}

IpcPart export_part(const void* address, std::int64_t bytes) {
  require_exportable(address);
  const auto pointer = reinterpret_cast<CUdeviceptr>(address);
  CUdeviceptr base = 0;
  std::size_t size = 0;
  const CUresult result = mem_get_address_range()(&base, &size, pointer);
  require(result == CUDA_SUCCESS, ErrorCode::kDevice,
          "cannot find the allocation of the memory at ", address, ": CUresult ",
          static_cast<int>(result));
  const auto left = static_cast<std::int64_t>(base + size - pointer);
  require(bytes <= left, ErrorCode::kInvalidArgument, "the memory at ", address, " ends after ",
          left, " bytes; ", bytes, " are needed");
  cudaIpcMemHandle_t handle{};
  static_assert(sizeof(handle.reserved) + sizeof(std::int64_t) == IpcPart::kBytes);
  check_cuda(cudaIpcGetMemHandle(&handle, reinterpret_cast<void*>(base)), "get a CUDA IPC handle");
  return {.handle = {handle.reserved, sizeof(handle.reserved)},
          .offset = static_cast<std::int64_t>(pointer - base)};
}

MappedPart::MappedPart(const IpcPart& part, const std::string& what)
    : device_(current_device()), handle_(part.handle) {
  try {
    address_ = static_cast<std::byte*>(opened_handles().acquire(device_, handle_)) + part.offset;
  } catch (const Error& e) {
    throw Error(e.code(), cat("cannot map ", what, ": ", e.what()));
  }
}

MappedPart::~MappedPart() {
  try {
    close();
  } catch (const Error&) {
    // The context is broken, or the owner is gone: there is nothing left to unmap.
  }
}

void MappedPart::close() {
  if (std::exchange(address_, nullptr) != nullptr) opened_handles().release(device_, handle_);
}

}  // namespace uniep::cuda
