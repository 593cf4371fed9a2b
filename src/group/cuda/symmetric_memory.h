#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "group/bootstrap.h"

namespace uniep::cuda {

/// Symmetric memory that the caller brings, begins at multiples of this.
inline constexpr std::int64_t kSymmetricAlignment = 256;

/// Memory that is not allocated here; nothing is set where all is. Every rank brings the same kind.
struct CallerMemory {
  /// This rank's memory. Without `peers` it is mapped between the ranks by CUDA IPC: a part of an
  /// allocation of cudaMalloc, as PyTorch's allocator gives it without expandable segments.
  void* local = nullptr;
  /// Everybody's memory as it is mapped here, by rank. This rank's is `local`, if that is set.
  std::vector<void*> peers{};
  /// Called once, when no rank uses this rank's memory any more: where the SymmetricMemory is
  /// destroyed, or later, as `free_released_memory` says. Must not throw. Never called where the
  /// constructor throws (the memory is the caller's again), nor after a peer died that used it.
  std::function<void()> release{};

  bool given() const { return local != nullptr || !peers.empty(); }
};

/// Device memory that every rank of a group allocates alike and reaches on all ranks by address.
class SymmetricMemory {
 public:
  /// Collective: `bytes`, the same on every rank, on each rank's current device; zeroed on all
  /// ranks when it returns. UNIEP_SYMMETRIC_MEMORY chooses the kind; "auto" takes NCCL's windows
  /// where every rank can, else CUDA IPC, which is also taken where ranks share a GPU and for the
  /// caller's memory. Where a rank fails, throws the same Error on all ranks.
  SymmetricMemory(Bootstrap& bootstrap, int rank, int size, std::int64_t bytes, int limit_ms,
                  const CallerMemory& caller = {}, bool shares_device = false);

  /// Not collective: peers may still use their mappings of this rank's memory.
  ~SymmetricMemory();
  SymmetricMemory(const SymmetricMemory&) = delete;
  SymmetricMemory& operator=(const SymmetricMemory&) = delete;

  void* local() const { return local_; }
  void* peer(int rank) const { return peers_[static_cast<std::size_t>(rank)]; }
  /// "nccl", "ipc", "caller" where the caller has mapped it, or "local" in a group of one.
  const char* kind() const;

  /// How memory is allocated and mapped.
  class Mapping;

 private:
  std::unique_ptr<Mapping> mapping_;
  void* local_ = nullptr;
  std::vector<void*> peers_;
};

/// Frees what peers have let go of since its SymmetricMemory was destroyed, the caller's by its
/// `release`. Where symmetric memory is made or destroyed, and a communicator ends, this is done
/// anyway.
void free_released_memory();

}  // namespace uniep::cuda
