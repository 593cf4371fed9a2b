#pragma once

#include <cstdint>
#include <memory>

#include "group/communicator_impl.h"
#include "group/cuda/symmetric_memory.h"
#include "group/joining.h"
#include "uniep/communicator.h"

namespace uniep::cuda {

/// One process of a group with a GPU each, or where that was asked for with shared ones, all on one
/// host.
class CudaCommunicator final : public CommunicatorImpl {
 public:
  /// Collective. Then this thread's current device is `device()`. Where a rank cannot use its
  /// device, or two would share one though neither the member nor UNIEP_SHARE_DEVICE says that they
  /// may, throws the same Error on all ranks. Where they may, or this process sees only one device,
  /// devices count modulo their number.
  explicit CudaCommunicator(GroupMember member);
  ~CudaCommunicator() override;

  int rank() const override { return member_.rank; }
  int size() const override { return member_.size; }
  RankLayout layout() const override { return {.hosts = 1, .local_ranks = member_.size}; }
  Backend backend() const override { return Backend::kCuda; }
  int device() const { return member_.device; }
  int gpus() const { return gpus_; }  ///< of the group; fewer than `size` where ranks share some
  Bootstrap& bootstrap() override { return *member_.bootstrap; }
  std::shared_ptr<void> use_device() const override;
  void fail(const std::string& sentence) override { member_.bootstrap->abandon(sentence); }

  /// Collective: zeroed memory of this size on every rank, mapped on all ranks; the caller's, where
  /// it brings some.
  std::unique_ptr<SymmetricMemory> symmetric_memory(std::int64_t bytes, int limit_ms,
                                                    const CallerMemory& caller = {});

 private:
  GroupMember member_;
  const int gpus_;
};

/// A group of this process alone, on this thread's current device.
Communicator single_rank();

}  // namespace uniep::cuda
