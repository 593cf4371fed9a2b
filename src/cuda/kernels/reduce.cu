#include "cuda/device/reduce.cuh"
#include "cuda/launch.h"

namespace uniep::cuda {
namespace {

constexpr int kReduceThreads = 256;

/// CTAs take token blocks in turn; the threads of a CTA share each token.
template <int kTopk>
__global__ void __launch_bounds__(kReduceThreads)
    reduce_kernel(const __grid_constant__ DeviceContext ctx) {
  const PassView& v = ctx.view;
  const std::int64_t size = ctx.queue.size();
  for (std::int64_t i = blockIdx.x; i < size; i += gridDim.x) {
    const Task task = queue_task(v, ctx.queue, i);
    int ready = 1;
    if (threadIdx.x == 0) ready = wait_for_inputs(ctx, task) ? 1 : 0;
    if (__syncthreads_and(ready) == 0) return;
    const std::int64_t first = task.m * v.schedule.token_block;
    const std::int64_t end = min_of<std::int64_t>(first + v.schedule.token_block, v.tokens);
    for (std::int64_t token = first; token < end; ++token) {
      reduce_token<kTopk>(ctx, token, threadIdx.x, kReduceThreads);
      if (v.pass == Pass::kBackward && static_cast<int>(threadIdx.x) < v.topk) {
        reduce_dprobs(ctx, token, static_cast<int>(threadIdx.x));
      }
    }
  }
}

}  // namespace

cudaError_t launch_reduce(const DeviceContext& ctx, int ctas, cudaStream_t stream) {
  const auto kernel = ctx.view.topk == 8   ? reduce_kernel<8>
                      : ctx.view.topk == 4 ? reduce_kernel<4>
                      : ctx.view.topk == 2 ? reduce_kernel<2>
                                           : reduce_kernel<0>;
  kernel<<<ctas, kReduceThreads, 0, stream>>>(ctx);
  return cudaGetLastError();
}

}  // namespace uniep::cuda
