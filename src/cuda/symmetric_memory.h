#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "comm/bootstrap.h"

namespace uniep::cuda {

/// Device memory that every rank of a group allocates alike and reaches on all ranks by address.
class SymmetricMemory {
 public:
  /// Collective: `bytes`, the same on every rank, on each rank's current device; zeroed on all
  /// ranks when it returns. UNIEP_SYMMETRIC_MEMORY chooses the kind; "auto" takes NCCL's windows
  /// where every rank can, else CUDA IPC. Where a rank fails, throws the same Error on all ranks.
  SymmetricMemory(Bootstrap& bootstrap, int rank, int size, std::int64_t bytes, int limit_ms);

  /// Not collective: peers may still use their mappings of this rank's memory.
  ~SymmetricMemory();
  SymmetricMemory(const SymmetricMemory&) = delete;
  SymmetricMemory& operator=(const SymmetricMemory&) = delete;

  void* local() const { return local_; }
  void* peer(int rank) const { return peers_[static_cast<std::size_t>(rank)]; }
  /// "nccl", "ipc", or "local" in a group of one.
  const char* kind() const;

  /// How memory is allocated and mapped.
  class Mapping;

 private:
  std::unique_ptr<Mapping> mapping_;
  void* local_ = nullptr;
  std::vector<void*> peers_;
};

}  // namespace uniep::cuda
