#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <type_traits>

namespace uniep::cuda {

/// Loads a kernel onto this thread's device.
template <class Kernel>
cudaError_t load_kernel(Kernel* kernel) {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, kernel);
}

/// Whether all CTAs are resident at a time, or none is, as those must be that wait for one another.
inline cudaLaunchAttribute resident_together(bool are = true) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = are ? 1 : 0;
  return attribute;
}

/// May begin before the last launch of its stream has ended, once that allows it
/// (ptx::let_next_launch_begin).
inline cudaLaunchAttribute beside_last_launch() {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  return attribute;
}

struct LaunchSize {
  int ctas = 1;
  int threads = 1;
  std::size_t shared_bytes = 0;  // dynamic
};

inline cudaLaunchConfig_t launch_config(const LaunchSize& size, cudaStream_t stream) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(size.ctas));
  config.blockDim = dim3(static_cast<unsigned>(size.threads));
  config.dynamicSmemBytes = size.shared_bytes;
  config.stream = stream;
  return config;
}

// Each returns the error of this launch; one that the caller's own launches have left stays theirs.

template <class... Args>
cudaError_t launch_kernel(void (*kernel)(Args...), const LaunchSize& size, cudaStream_t stream,
                          const std::type_identity_t<Args>&... args) {
  const cudaLaunchConfig_t config = launch_config(size, stream);
  return cudaLaunchKernelEx(&config, kernel, args...);
}

template <class... Args>
cudaError_t launch_kernel(void (*kernel)(Args...), const LaunchSize& size,
                          cudaLaunchAttribute attribute, cudaStream_t stream,
                          const std::type_identity_t<Args>&... args) {
  cudaLaunchConfig_t config = launch_config(size, stream);
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

}  // namespace uniep::cuda
