#include "cuda/kernels/start_kernel.h"
#include "cuda/plan_kernels.h"

namespace uniep::cuda {
namespace {

constexpr int kReturnThreads = 256;

/// One CTA: of the launches that share a pool, one runs at a time.
__global__ void __launch_bounds__(kReturnThreads)
    return_pages_kernel(const __grid_constant__ PageStack stack,
                        const std::int32_t* __restrict__ pages, std::int32_t* num_pages) {
  const std::int32_t count = *num_pages;
  const std::int32_t free = *stack.free;
  for (int group = threadIdx.x; group < count; group += kReturnThreads) {
    stack.given_back(free, group) = pages[group];
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  *stack.free = free + count;
  *num_pages = 0;  // a second time nothing goes back
}

}  // namespace

cudaError_t prepare_return_pages() { return load_kernel(return_pages_kernel); }

cudaError_t launch_return_pages(const PageStack& stack, const DevicePlan& plan,
                                cudaStream_t stream) {
  return launch_kernel(return_pages_kernel, {.ctas = 1, .threads = kReturnThreads}, stream, stack,
                       plan.pages, plan.num_pages);
}

}  // namespace uniep::cuda
