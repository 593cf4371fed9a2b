#pragma once

#include <cuda_runtime_api.h>

#include <span>
#include <utility>
#include <vector>

#include "base/cuda/check_cuda.h"
#include "base/cuda/device_scope.h"

namespace uniep::cuda {

/// Owned device memory. Constructors return when it holds what they say, for any stream: streams
/// that do not wait for the default one would not wait for what runs there.
template <class T>
class DeviceArray {
 public:
  DeviceArray() = default;
  /// Zeroes.
  explicit DeviceArray(std::int64_t count) : DeviceArray(uninitialized(count)) {
    if (count == 0) return;
    check_cuda(cudaMemset(data_, 0, bytes()), "clear device memory");
    check_cuda(cudaStreamSynchronize(nullptr), "clear device memory");
  }
  /// A copy of what the host holds.
  explicit DeviceArray(std::span<const T> host)
      : DeviceArray(uninitialized(static_cast<std::int64_t>(host.size()))) {
    if (host.empty()) return;
    check_cuda(cudaMemcpy(data_, host.data(), bytes(), cudaMemcpyHostToDevice),
               "copy to the device");
    check_cuda(cudaStreamSynchronize(nullptr), "copy to the device");
  }
  static DeviceArray uninitialized(std::int64_t count) {
    DeviceArray array;
    if (count == 0) return array;
    array.count_ = count;
    array.device_ = current_device();
    check_cuda(cudaMalloc(reinterpret_cast<void**>(&array.data_), array.bytes()),
               cat("allocate ", array.bytes(), " bytes of device memory"));
    return array;
  }
  DeviceArray(DeviceArray&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)),
        count_(std::exchange(other.count_, 0)),
        device_(other.device_) {}
  DeviceArray& operator=(DeviceArray&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(count_, other.count_);
    std::swap(device_, other.device_);
    return *this;
  }
  ~DeviceArray() {
    if (data_ == nullptr) return;      // even of nothing, cudaFree ends a graph capture in failure
    const DeviceScope scope(device_);  // of a thread that has used none, it would begin to use 0
    ignore_cuda(cudaFree(data_));
  }

  T* data() const { return data_; }
  std::int64_t size() const { return count_; }
  std::span<T> span() const { return {data_, static_cast<std::size_t>(count_)}; }

  /// Waits for the device.
  std::vector<T> to_host() const {
    std::vector<T> host(static_cast<std::size_t>(count_));
    if (count_ > 0) {
      check_cuda(cudaMemcpy(host.data(), data_, bytes(), cudaMemcpyDeviceToHost),
                 "copy from the device");
    }
    return host;
  }

 private:
  std::size_t bytes() const { return static_cast<std::size_t>(count_) * sizeof(T); }

  T* data_ = nullptr;
  std::int64_t count_ = 0;
  int device_ = 0;
};

}  // namespace uniep::cuda
