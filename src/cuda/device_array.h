#pragma once

#include <cuda_runtime_api.h>

#include <span>
#include <utility>
#include <vector>

#include "cuda/check.h"

namespace uniep::cuda {

/// Owned device memory, zeroed at first.
template <class T>
class DeviceArray {
 public:
  DeviceArray() = default;
  explicit DeviceArray(std::int64_t count) : count_(count) {
    if (count == 0) return;
    const std::size_t bytes = static_cast<std::size_t>(count) * sizeof(T);
    check_cuda(cudaMalloc(reinterpret_cast<void**>(&data_), bytes), "allocate device memory");
    check_cuda(cudaMemset(data_, 0, bytes), "clear device memory");
  }
  /// A copy of what the host holds.
  explicit DeviceArray(std::span<const T> host)
      : DeviceArray(static_cast<std::int64_t>(host.size())) {
    if (count_ > 0) {
      check_cuda(cudaMemcpy(data_, host.data(), host.size_bytes(), cudaMemcpyHostToDevice),
                 "copy to the device");
    }
  }
  DeviceArray(DeviceArray&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), count_(std::exchange(other.count_, 0)) {}
  DeviceArray& operator=(DeviceArray&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(count_, other.count_);
    return *this;
  }
  ~DeviceArray() {
    if (data_ != nullptr) cudaFree(data_);  // even of nothing, it ends a graph capture in failure
  }

  T* data() const { return data_; }
  std::int64_t size() const { return count_; }
  std::span<T> span() const { return {data_, static_cast<std::size_t>(count_)}; }

  /// Waits for the device.
  std::vector<T> to_host() const {
    std::vector<T> host(static_cast<std::size_t>(count_));
    if (count_ > 0) {
      check_cuda(cudaMemcpy(host.data(), data_, host.size() * sizeof(T), cudaMemcpyDeviceToHost),
                 "copy from the device");
    }
    return host;
  }

 private:
  T* data_ = nullptr;
  std::int64_t count_ = 0;
};

}  // namespace uniep::cuda
