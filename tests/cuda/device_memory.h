#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "base/cuda/check_cuda.h"

namespace uniep::testing {

inline bool have_device() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
}

/// Device memory, every byte of which has a value that no kernel can mistake for a result.
class DeviceMemory {
 public:
  explicit DeviceMemory(std::int64_t bytes, int value = kPoison) : bytes_(bytes) {
    cuda::check_cuda(cudaMalloc(&data_, static_cast<std::size_t>(bytes_ + 1)), "allocate");
    fill(value);
  }
  ~DeviceMemory() { cudaFree(data_); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  static constexpr int kPoison = 0xa5;

  std::byte* data() const { return static_cast<std::byte*>(data_); }
  void fill(int value) const {
    cuda::check_cuda(cudaMemset(data_, value, static_cast<std::size_t>(bytes_)), "fill");
  }

 private:
  std::int64_t bytes_;
  void* data_ = nullptr;
};

template <class T>
std::vector<T> download(const T* device, std::int64_t count) {
  std::vector<T> values(static_cast<std::size_t>(count));
  cuda::check_cuda(cudaMemcpy(values.data(), device, values.size() * sizeof(T), cudaMemcpyDefault),
                   "download");
  return values;
}

template <class T>
void upload(const std::vector<T>& values, T* device) {
  cuda::check_cuda(cudaMemcpy(device, values.data(), values.size() * sizeof(T), cudaMemcpyDefault),
                   "upload");
}

}  // namespace uniep::testing
