#include "cuda/row_pool.h"

#include "base/check.h"
#include "base/cuda/device_scope.h"
#include "group/cuda/cuda_communicator.h"

namespace uniep::cuda {
namespace {

const CudaCommunicator& member(const Communicator& communicator) {
  return dynamic_cast<const CudaCommunicator&>(*communicator.impl());
}

/// Waits for the device.
template <class T>
std::vector<T> download(const T* from, std::int64_t count) {
  std::vector<T> to(static_cast<std::size_t>(count));
  check_cuda(cudaDeviceSynchronize(), "wait for the device");
  check_cuda(cudaMemcpy(to.data(), from, to.size() * sizeof(T), cudaMemcpyDeviceToHost),
             "ask for the pages of a row pool");
  return to;
}

void upload_free_pages(const PageStack& stack, std::int64_t pages) {
  std::vector<std::int32_t> free(2), numbers(static_cast<std::size_t>(pages));
  fill_page_stack({free.data(), numbers.data()}, pages);
  const auto copy = [](std::int32_t* to, const std::vector<std::int32_t>& from) {
    check_cuda(cudaMemcpy(to, from.data(), from.size() * sizeof(from[0]), cudaMemcpyHostToDevice),
               "fill a row pool");
  };
  copy(stack.free, free);
  copy(stack.pages, numbers);
  check_cuda(cudaStreamSynchronize(nullptr), "fill a row pool");
}

}  // namespace

DeviceRowPool::DeviceRowPool(const Problem& p, std::int64_t num_pages, int device,
                             DeviceArray<std::byte> own, std::byte* start)
    : RowPoolData(Backend::kCuda, p, num_pages, start), device_(device), own_(std::move(own)) {
  upload_free_pages(stack(), num_pages);
}

std::unique_lock<std::mutex> DeviceRowPool::begin_call(cudaStream_t stream, bool captured) {
  std::unique_lock turn(turn_);
  const std::scoped_lock lock(mutex_);
  calls_.begin_call(stream);
  if (captured) return turn;
  for (const Return& r : returns_) {
    check_cuda(launch_return_pages(stack(), r.plan, stream), "launch return_pages");
  }
  // The next user of a plan's memory comes behind this call.
  returns_.clear();
  return turn;
}

void DeviceRowPool::return_later(const std::shared_ptr<std::byte>& memory, const DevicePlan& plan) {
  const std::scoped_lock lock(mutex_);
  returns_.push_back({memory, plan});
}

std::int64_t DeviceRowPool::free_pages() const {
  const std::scoped_lock lock(mutex_);
  const DeviceScope scope(device_);
  calls_.require_no_capture("RowPool::free_pages");
  std::int64_t free = download(stack().free, 1)[0];
  for (const Return& r : returns_) free += download(r.plan.num_pages, 1)[0];
  return free;
}

std::int64_t DeviceRowPool::fewest_free_pages() const {
  const std::scoped_lock lock(mutex_);
  const DeviceScope scope(device_);
  calls_.require_no_capture("RowPool::fewest_free_pages");
  return download(stack().free, 2)[1];
}

void DeviceLease::give_back_on(cudaStream_t stream, bool captured) {
  if (!held_.exchange(false)) return;
  captured_ = captured_ || captured;
  check_cuda(launch_return_pages(pool_->stack(), plan_, stream), "launch return_pages");
}

std::int64_t free_device_bytes(const Communicator& communicator) {
  const CudaCommunicator& comm = member(communicator);
  const DeviceScope scope(comm.device());
  std::size_t free = 0, total = 0;
  check_cuda(cudaMemGetInfo(&free, &total), "ask for the free device memory");
  return static_cast<std::int64_t>(free) / ceil_div(comm.size(), comm.gpus());
}

std::shared_ptr<RowPoolData> make_row_pool(const Problem& problem, const Communicator& communicator,
                                           std::int64_t bytes, std::span<std::byte> memory) {
  const int device = member(communicator).device();
  const auto reason = unsupported_reason(problem, communicator.size());
  require(!reason, ErrorCode::kUnsupported, reason.value_or(""));
  const DeviceScope scope(device);
  const std::int64_t pages = pages_in(problem, bytes);
  DeviceArray<std::byte> own;
  if (memory.empty()) {
    own = DeviceArray<std::byte>::uninitialized(PagePoolLayout(problem, pages).bytes);
  }
  std::byte* const start = memory.empty() ? own.data() : memory.data();
  return std::make_shared<DeviceRowPool>(problem, pages, device, std::move(own), start);
}

}  // namespace uniep::cuda
