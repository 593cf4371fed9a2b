#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "comm/bootstrap.h"
#include "comm/communicator_impl.h"
#include "comm/failure.h"
#include "comm/link.h"
#include "comm/signal_courier.h"

namespace uniep {

/// A block of memory, zero at first; pages that are never touched take no memory.
class Heap {
 public:
  explicit Heap(std::int64_t bytes);
  ~Heap();
  Heap(const Heap&) = delete;
  Heap& operator=(const Heap&) = delete;

  std::byte* data() const { return data_; }
  std::int64_t bytes() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  std::int64_t bytes_ = 0;
};

/// What the ranks of one process share.
class CpuGroup {
 public:
  explicit CpuGroup(int size);

  int size() const { return size_; }
  FailureLatch& failure() { return failure_; }
  Link& link() { return link_; }
  /// Only with an emulated link.
  SignalCourier* courier() { return courier_ ? &*courier_ : nullptr; }

  std::vector<std::string> all_gather(int rank, const std::string& bytes, const char* stage,
                                      int limit_ms);

  /// Collective: each rank brings a heap, all of the same size, and gets access to everyone's,
  /// which last as long as anybody holds them.
  std::vector<std::shared_ptr<Heap>> share(int rank, const std::shared_ptr<Heap>& own,
                                           int limit_ms);

 private:
  /// One all_gather under way. A fast rank may begin the next before slow ones have left this one.
  struct Round {
    std::vector<std::optional<std::string>> parts;
    int present = 0;
    int left = 0;
  };

  const int size_;
  FailureLatch failure_;
  Link link_;
  std::optional<SignalCourier> courier_;

  std::mutex mutex_;
  std::condition_variable arrived_;
  std::map<std::uint64_t, Round> rounds_;
  std::vector<std::uint64_t> next_round_;  // by rank
  std::map<std::uint64_t, std::vector<std::weak_ptr<Heap>>> heaps_;
  std::vector<std::uint64_t> next_heap_;  // by rank
};

/// One rank of a CpuGroup.
class CpuCommunicator final : public CommunicatorImpl, public Bootstrap {
 public:
  CpuCommunicator(std::shared_ptr<CpuGroup> group, int rank)
      : group_(std::move(group)), rank_(rank) {}

  int rank() const override { return rank_; }
  int size() const override { return group_->size(); }
  Backend backend() const override { return Backend::kCpu; }
  CpuGroup& group() const { return *group_; }
  Bootstrap& bootstrap() override { return *this; }

  std::vector<std::string> all_gather(const std::string& bytes, const char* stage,
                                      int limit_ms) override {
    return group_->all_gather(rank_, bytes, stage, limit_ms);
  }
  void check() override { group_->failure().check(); }

  /// A number for the layer that is made now, the same on all ranks, as all make them together.
  int number_layer() { return ++layers_; }

 private:
  std::shared_ptr<CpuGroup> group_;
  int rank_;
  int layers_ = 0;
};

}  // namespace uniep
