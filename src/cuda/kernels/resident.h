#pragma once

#include "base/math.h"
#include "cuda/kernels/start_kernel.h"
#include "cuda/plan_memory.h"

namespace uniep::cuda {

/// Launches at most `ctas` CTAs, resident together. Neither allocates nor synchronises, nor changes
/// the kernel, which other threads may be launching.
template <class Args>
cudaError_t launch_resident(void (*kernel)(Args), const Args& args, int threads,
                            std::size_t shared_bytes, int ctas, cudaStream_t stream) {
  const LaunchSize size{min_of(ctas, kMaxPlanCtas), threads, shared_bytes};
  return launch_kernel(kernel, size, resident_together(), stream, args);
}

}  // namespace uniep::cuda
