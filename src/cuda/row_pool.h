#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "cuda/device_array.h"
#include "cuda/plan_kernels.h"
#include "cuda/stream_order.h"
#include "layer/row_pool_data.h"
#include "plan/page_lease.h"
#include "uniep/communicator.h"

namespace uniep::cuda {

/// A row pool of a GPU. Its free pages are the device's business: the plan kernel takes some, a
/// small kernel gives them back. All calls of layers that share the pool run one after another, in
/// the order in which they are made, whatever streams they are on: so no two kernels change the
/// stack at a time, and who has a page next writes it after who had it before.
class DeviceRowPool final : public RowPoolData {
 public:
  /// `own`: the memory, or empty where it is the caller's.
  DeviceRowPool(const Problem& p, std::int64_t num_pages, int device, DeviceArray<std::byte> own,
                std::byte* start);

  int device() const { return device_; }
  PlanPool for_plans() const { return {stack(), pages, page_bytes(problem), page_shape(problem)}; }

  /// Puts what a call of a layer does on `stream` after all calls of others before. Returns pages
  /// that were to go back; not in a capture, which runs at another time. Calls of other threads
  /// wait as long as the lock is held: until all that the call does is on the stream.
  [[nodiscard]] std::unique_lock<std::mutex> begin_call(cudaStream_t stream, bool captured);

  /// Returns the plan's pages with the next call. `memory` is the plan's, and held until then.
  void return_later(const std::shared_ptr<std::byte>& memory, const DevicePlan& plan);

  // Both wait for the device.
  std::int64_t free_pages() const override;
  std::int64_t fewest_free_pages() const override;

 private:
  struct Return {
    std::shared_ptr<std::byte> memory;
    DevicePlan plan;
  };

  const int device_;
  const DeviceArray<std::byte> own_;
  std::mutex turn_;           // of the call that is being put on a stream
  mutable std::mutex mutex_;  // of all below
  StreamOrder calls_{nullptr};
  std::vector<Return> returns_;
};

/// The pages of a plan in device memory.
class DeviceLease final : public PageLease {
 public:
  /// `captured`: the plan is made, and takes pages, in every replay of a CUDA graph.
  DeviceLease(std::shared_ptr<DeviceRowPool> pool, std::shared_ptr<std::byte> memory,
              const DevicePlan& plan, bool captured)
      : PageLease(pool.get()),
        pool_(std::move(pool)),
        memory_(std::move(memory)),
        plan_(plan),
        captured_(captured) {
    held_ = true;
  }
  ~DeviceLease() override {
    if (captured_) held_ = true;  // a replay may have taken pages and another not given them back
    give_back();
  }

  /// Gives the pages back, after what is on the stream.
  void give_back_on(cudaStream_t stream, bool captured);

 private:
  void return_pages() override { pool_->return_later(memory_, plan_); }

  const std::shared_ptr<DeviceRowPool> pool_;
  const std::shared_ptr<std::byte> memory_;
  const DevicePlan plan_;
  bool captured_;  // the plan, or what gives its pages back
};

/// Memory that is free on the member's device, a rank's share.
std::int64_t free_device_bytes(const Communicator& communicator);

/// A pool of at most so many bytes, in the caller's memory if there is any.
std::shared_ptr<RowPoolData> make_row_pool(const Problem& problem, const Communicator& communicator,
                                           std::int64_t bytes, std::span<std::byte> memory);

}  // namespace uniep::cuda
