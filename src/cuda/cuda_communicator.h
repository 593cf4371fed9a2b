#pragma once

#include <cstdint>
#include <memory>

#include "comm/communicator_impl.h"
#include "comm/process_environment.h"
#include "comm/tcp_bootstrap.h"
#include "cuda/symmetric_memory.h"
#include "uniep/communicator.h"

namespace uniep::cuda {

/// One process of a group with a GPU each, all on one host.
class CudaCommunicator final : public CommunicatorImpl {
 public:
  /// Collective. Waits for the group; then this thread's current device is `device()`. Where a rank
  /// cannot use its device, or two would share one, throws the same Error on all ranks.
  CudaCommunicator(const ProcessEnvironment& environment, int limit_ms);

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  Backend backend() const override { return Backend::kCuda; }
  int device() const { return device_; }
  Bootstrap& bootstrap() override { return bootstrap_; }

  /// Collective: zeroed memory of this size on every rank, mapped on all ranks.
  std::unique_ptr<SymmetricMemory> symmetric_memory(std::int64_t bytes, int limit_ms);

 private:
  const int rank_;
  const int size_;
  const int device_;
  TcpBootstrap bootstrap_;
};

/// A group of this process alone, on this thread's current device.
Communicator single_rank();

/// What `Communicator::cuda_from_environment` refers to.
std::shared_ptr<CommunicatorImpl> communicator_from_environment();

}  // namespace uniep::cuda
