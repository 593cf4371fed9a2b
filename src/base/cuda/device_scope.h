#pragma once

#include <cuda_runtime_api.h>

#include "base/cuda/check_cuda.h"
#include "base/cuda/driver.h"

namespace uniep::cuda {

/// Makes a device current for this thread while it lives; then again the one before, where this
/// process has used that.
class DeviceScope {
 public:
  explicit DeviceScope(int device) {
    ignore_cuda(cudaGetDevice(&before_));
    // Even of the device that is current: a thread that has used none yet, such as one that runs a
    // backward pass, has no context for the driver's functions before this.
    ignore_cuda(cudaSetDevice(device));
    device_ = device;
  }
  /// A thread that has used no device yet says that its current one is 0. To make that current
  /// would take some hundred megabytes of a GPU that other processes use.
  ~DeviceScope() {
    if (before_ != device_ && has_context(before_)) ignore_cuda(cudaSetDevice(before_));
  }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int before_ = 0;
  int device_ = 0;
};

inline int current_device() {
  int device = 0;
  check_cuda(cudaGetDevice(&device), "ask for the current device");
  return device;
}

}  // namespace uniep::cuda
