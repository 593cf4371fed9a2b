// Symmetric memory by CUDA IPC handles: needs nothing but the driver.
//
// Memory must not be freed while a peer has it mapped. Ranks do not destroy their objects together,
// so a rank that lets go of a mapping says so in the memory itself, and the owner frees it later.
#include <cstring>
#include <list>
#include <mutex>
#include <utility>

#include "base/math.h"
#include "cuda/check.h"
#include "cuda/device_scope.h"
#include "cuda/symmetric_mapping.h"

namespace uniep::cuda {
namespace {

/// Handles stand for whole blocks of this size, whatever was asked for.
constexpr std::int64_t kBlock = 2 << 20;

/// This rank's memory; behind the caller's bytes, a word for each rank that has let go of it.
struct Exported {
  int device;
  std::byte* memory;
  std::int64_t released;  // offset of uint32 [size]
  int rank;
  int size;

  bool released_by_all() const {
    std::vector<std::uint32_t> words(static_cast<std::size_t>(size));
    if (cudaMemcpy(words.data(), memory + released, words.size() * sizeof(words[0]),
                   cudaMemcpyDeviceToHost) != cudaSuccess) {
      return false;
    }
    words[static_cast<std::size_t>(rank)] = 1;
    for (const std::uint32_t word : words) {
      if (word == 0) return false;
    }
    return true;
  }
};

std::mutex released_mutex;
std::list<Exported>& waiting_for_release() {
  static auto* list = new std::list<Exported>;  // outlives static objects that hold memory
  return *list;
}

class IpcMapping final : public SymmetricMemory::Mapping {
 public:
  explicit IpcMapping(const SymmetricRequest& request)
      : own_{.device = current_device(),
             .memory = nullptr,
             .released = round_up<std::int64_t>(request.bytes, 256),
             .rank = request.rank,
             .size = request.size},
        peers_(static_cast<std::size_t>(request.size)) {
    const std::int64_t words = request.size * static_cast<std::int64_t>(sizeof(std::uint32_t));
    const auto bytes = static_cast<std::size_t>(round_up(own_.released + words, kBlock));
    void* memory = nullptr;
    check_cuda(cudaMalloc(&memory, bytes), cat("allocate ", bytes, " bytes"));
    own_.memory = static_cast<std::byte*>(memory);
    check_cuda(cudaMemset(memory, 0, bytes), "clear memory");
    check_cuda(cudaDeviceSynchronize(), "clear memory");
  }

  ~IpcMapping() override {
    if (own_.memory == nullptr) return;
    const DeviceScope scope(own_.device);
    // Errors would say that the context is broken or a peer is gone: there is nothing left to do.
    (void)cudaDeviceSynchronize();
    for (std::size_t r = 0; r < peers_.size(); ++r) {
      if (peers_[r] == nullptr || static_cast<int>(r) == own_.rank) continue;
      std::byte* word = static_cast<std::byte*>(peers_[r]) + own_.released +
                        own_.rank * static_cast<std::int64_t>(sizeof(std::uint32_t));
      (void)cudaMemset(word, 1, sizeof(std::uint32_t));
      (void)cudaDeviceSynchronize();
      (void)cudaIpcCloseMemHandle(peers_[r]);
    }
    if (opened_) {
      const std::scoped_lock lock(released_mutex);
      waiting_for_release().push_back(own_);
    } else {
      (void)cudaFree(own_.memory);
    }
    free_released_ipc_memory();
    (void)cudaGetLastError();
  }

  std::string handle() {
    cudaIpcMemHandle_t handle{};
    check_cuda(cudaIpcGetMemHandle(&handle, own_.memory), "get an IPC handle");
    opened_ = true;  // a peer may open it from now on
    return {handle.reserved, sizeof(handle.reserved)};
  }

  void open(const std::vector<std::string>& handles) {
    for (std::size_t r = 0; r < handles.size(); ++r) {
      if (static_cast<int>(r) == own_.rank) {
        peers_[r] = own_.memory;
        continue;
      }
      cudaIpcMemHandle_t handle{};
      std::memcpy(handle.reserved, handles[r].data(), sizeof(handle.reserved));
      check_cuda(cudaIpcOpenMemHandle(&peers_[r], handle, cudaIpcMemLazyEnablePeerAccess),
                 cat("map the memory of rank ", r, " by its IPC handle"));
    }
  }

  /// Lets go of the peers' memory.
  void close() {
    for (std::size_t r = 0; r < peers_.size(); ++r) {
      void* const peer = std::exchange(peers_[r], nullptr);
      if (peer != nullptr && peer != own_.memory) {
        check_cuda(cudaIpcCloseMemHandle(peer), cat("unmap the memory of rank ", r));
      }
    }
  }
  /// No peer has this rank's memory: it can be freed as any other.
  void unshare() { opened_ = false; }

  void* local() const override { return own_.memory; }
  std::vector<void*> peers() const override { return peers_; }
  const char* kind() const override { return "ipc"; }

 private:
  Exported own_;
  std::vector<void*> peers_;
  bool opened_ = false;
};

/// Collective, after a rank could not map all: without it no memory would ever be let go of by all.
void undo(const SymmetricRequest& request, IpcMapping& mapping) {
  try {
    together(request.bootstrap, request.limit_ms, "ipc unmapping", [&] {
      mapping.close();
      return std::string();
    });
    mapping.unshare();
  } catch (const Error&) {
    // A rank is gone, or its device: what led here says more.
  }
}

}  // namespace

void free_released_ipc_memory() {
  const std::scoped_lock lock(released_mutex);
  waiting_for_release().remove_if([](const Exported& e) {
    const DeviceScope scope(e.device);
    if (!e.released_by_all()) return false;
    (void)cudaFree(e.memory);
    return true;
  });
}

std::unique_ptr<SymmetricMemory::Mapping> make_ipc_mapping(const SymmetricRequest& request) {
  std::unique_ptr<IpcMapping> mapping;
  const auto handles = together(request.bootstrap, request.limit_ms, "ipc memory", [&] {
    mapping = std::make_unique<IpcMapping>(request);
    return mapping->handle();
  });
  try {
    together(request.bootstrap, request.limit_ms, "ipc mapping", [&] {
      mapping->open(handles);
      return std::string();
    });
  } catch (const Error&) {
    undo(request, *mapping);
    throw;
  }
  return mapping;
}

}  // namespace uniep::cuda
