#pragma once

#include <cuda_runtime_api.h>

#include "base/cuda/check_cuda.h"

namespace uniep::cuda {

/// One T in host memory that kernels write.
template <class T>
class HostVisible {
 public:
  HostVisible() {
    check_cuda(cudaHostAlloc(reinterpret_cast<void**>(&value_), sizeof(T), cudaHostAllocMapped),
               "allocate host memory");
    *value_ = T{};
  }
  ~HostVisible() { cudaFreeHost(value_); }
  HostVisible(const HostVisible&) = delete;
  HostVisible& operator=(const HostVisible&) = delete;
  T* get() const { return value_; }

 private:
  T* value_ = nullptr;
};

}  // namespace uniep::cuda
